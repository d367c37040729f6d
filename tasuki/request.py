"""A request as an engine keeps it: tokens, progress, state.

Knows nothing about blocks, tensors or streams. There are no phases: `num_computed_tokens` chases
`num_tokens`, and a token is sampled whenever it catches up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from tasuki.messages import FinishReason, SamplingParams, TokenLogprob


class RequestStatus(StrEnum):
    WAITING = "waiting"  # in the scheduler's queue
    RUNNING = "running"
    PARKED = "parked"  # outside the scheduler: a handoff owns its progress
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One request in one engine. `output_token_ids` includes tokens given by earlier owners."""

    key: int  # unique in this engine; a request id may be seen twice
    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: frozenset[int]
    arrived: float
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    preemptions: int = 0
    holds_blocks: bool = False  # its blocks outlive it: a handoff still sends them
    computed_prompt_tokens: int = 0  # prompt positions computed by this engine, recomputes included
    first_scheduled: float | None = None
    # of prompt tokens from the second on, while they are being computed; None: not wanted, or told
    prompt_logprobs: list[TokenLogprob] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        # whoever gave output tokens has told of the prompt before
        if self.sampling.prompt_logprobs is not None and not self.output_token_ids:
            self.prompt_logprobs = []

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens whose values are known: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def remaining_tokens(self) -> int:
        """Known tokens whose KV is not computed yet; one in steady decode."""
        return self.num_tokens - self.num_computed_tokens

    def tokens(self, start: int, count: int) -> list[int]:
        """`count` token ids from position `start`, across prompt and output."""
        split = self.prompt_len
        if start + count <= split:
            return self.prompt_token_ids[start : start + count]
        if start >= split:
            return self.output_token_ids[start - split : start - split + count]
        return self.prompt_token_ids[start:] + self.output_token_ids[: start + count - split]

    def append(self, token_id: int, max_model_len: int) -> None:
        """Take one sampled token and decide whether it is the last."""
        self.output_token_ids.append(token_id)
        self.finish_reason = self.reason_to_stop(max_model_len)

    def reason_to_stop(self, max_model_len: int) -> FinishReason | None:
        """Why the last output token ends the request, if it does. A stop goes before length."""
        if self.output_token_ids and self.is_stop(self.output_token_ids[-1]):
            return FinishReason.STOP
        if len(self.output_token_ids) >= self.sampling.max_tokens:
            return FinishReason.LENGTH
        return FinishReason.LENGTH if self.num_tokens >= max_model_len else None

    def is_stop(self, token_id: int) -> bool:
        """Whether the last output token, this one, is an EOS or a stop token that counts."""
        if len(self.output_token_ids) <= self.sampling.min_tokens:
            return False
        eos = token_id in self.eos_token_ids and not self.sampling.ignore_eos
        return eos or token_id in self.sampling.stop_token_ids

    @property
    def stop_token_id(self) -> int | None:
        """The stop token that ended the request; an EOS of the model is none of its own."""
        if self.finish_reason is not FinishReason.STOP:
            return None
        last = self.output_token_ids[-1]
        if last in self.eos_token_ids and not self.sampling.ignore_eos:
            return None
        return last

    # --- logprobs of the prompt -------------------------------------------------------------

    def logits_wanted(self, start: int, count: int) -> int:
        """How many of the last of `count` positions from `start` on need their logits.

        What was told of the prompt before a preemption is not computed again.
        """
        end = start + count
        if self.prompt_logprobs is None:
            return int(end == self.num_tokens)
        assert start <= len(self.prompt_logprobs), "a part of the prompt was not computed here"
        return max(0, end - max(start, len(self.prompt_logprobs)))

    def add_prompt_logprobs(self, logprobs: Iterable[TokenLogprob]) -> None:
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += logprobs

    def take_prompt_logprobs(self) -> list[TokenLogprob]:
        """All of them, once; they are not wanted any more."""
        taken, self.prompt_logprobs = self.prompt_logprobs or [], None
        return taken
