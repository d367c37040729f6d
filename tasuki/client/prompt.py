"""A prompt in one of its three forms, and how to continue it, as a GenerateRequest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasuki.client.sampling import SamplingOptions, sampling_to_proto
from tasuki.errors import InvalidRequestError
from tasuki.v1 import inference_pb2


@dataclass(frozen=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str  # "system", "user" or "assistant"
    content: str


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The arguments of `Client.generate`; None leaves a choice to the cluster."""

    prompt: str | None
    prompt_token_ids: Sequence[int] | None
    messages: Sequence[ChatMessage | Mapping[str, str]] | None
    sampling: SamplingOptions
    request_id: str | None
    model: str | None
    slo_ttft_ms: float | None
    slo_tpot_ms: float | None
    priority: int = 0
    cache_salt: str = ""

    def to_proto(self) -> inference_pb2.GenerateRequest:
        """Raises InvalidRequestError unless there is exactly one prompt and every number fits."""
        forms = (self.prompt, self.prompt_token_ids, self.messages)
        given = sum(form is not None for form in forms)
        if given != 1:
            raise InvalidRequestError(
                f"{given} prompts were given; expected exactly one of "
                "prompt, prompt_token_ids and messages"
            )
        try:
            request = inference_pb2.GenerateRequest(
                request_id=self.request_id or "",
                model=self.model or "",
                sampling=sampling_to_proto(self.sampling),
                slo=inference_pb2.Slo(ttft_ms=self.slo_ttft_ms, tpot_ms=self.slo_tpot_ms),
                priority=self.priority,
                cache_salt=self.cache_salt,
            )
            self._set_prompt(request)
        except (ValueError, TypeError) as error:
            raise InvalidRequestError(
                f"the request cannot be sent: {error}; expected max_tokens, seed and other "
                "counts to be whole numbers, not negative, and token ids to be the model's"
            ) from error
        return request

    def _set_prompt(self, request: inference_pb2.GenerateRequest) -> None:
        if self.prompt is not None:
            request.text = self.prompt
        elif self.prompt_token_ids is not None:
            request.token_ids.CopyFrom(inference_pb2.TokenIds(ids=self.prompt_token_ids))
        elif self.messages is not None:
            turns = [_turn_to_proto(message) for message in self.messages]
            request.messages.CopyFrom(inference_pb2.Messages(messages=turns))


def _turn_to_proto(message: Any) -> inference_pb2.ChatMessage:
    if isinstance(message, ChatMessage):
        return inference_pb2.ChatMessage(role=message.role, content=message.content)
    if isinstance(message, Mapping) and set(message) == {"role", "content"}:
        return inference_pb2.ChatMessage(role=message["role"], content=message["content"])
    raise InvalidRequestError(
        f"a message is {message!r}; expected a ChatMessage or a mapping with role and content"
    )
