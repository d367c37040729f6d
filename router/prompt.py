"""From one of three forms of prompt to token ids, or a clear refusal.

Knows nothing about placement. Every size is checked before work in proportion to it is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from router.served_model import ServedModel
from tasuki.errors import InvalidRequestError, RequestTooLongError
from tasuki.v1 import inference_pb2

MAX_CHARACTERS = 4 << 20
MAX_MESSAGES = 4096
ROLES = ("system", "user", "assistant")
LONG_TEXT = 20_000  # characters; tokenizing more would hold up every other stream of this process


async def prompt_token_ids(
    request: inference_pb2.GenerateRequest, model: ServedModel, capacity: int
) -> list[int]:
    """The prompt as ids, at least one, at most `capacity` - 1.

    Raises InvalidRequestError for a prompt that is missing, empty or malformed, RequestTooLongError
    for one that leaves no room for an output token.
    """
    form = request.WhichOneof("prompt")
    if form == "token_ids":
        ids = list(request.token_ids.ids)
        _require_length(len(ids), capacity)
        _require_vocabulary(ids, model)
        return ids
    if form == "text":
        ids = await _encode(request.text, model, add_special_tokens=True)
    elif form == "messages":
        ids = await _encode(_render(request.messages, model), model, add_special_tokens=False)
    else:
        raise InvalidRequestError(
            "the request has no prompt; set exactly one of text, token_ids and messages"
        )
    _require_length(len(ids), capacity)
    return ids


def _require_length(count: int, capacity: int) -> None:
    if count == 0:
        raise InvalidRequestError("the prompt is empty; expected at least one token")
    if count + 1 > capacity:
        raise RequestTooLongError(
            f"the prompt has {count} tokens, with one output token {count + 1}, and this "
            f"cluster holds at most {capacity} per request; send a shorter prompt"
        )


def _require_vocabulary(ids: Sequence[int], model: ServedModel) -> None:
    if max(ids) < model.vocab_size:  # the wire type is unsigned
        return
    position = next(i for i, token in enumerate(ids) if token >= model.vocab_size)
    raise InvalidRequestError(
        f"token id {ids[position]} at position {position} of the prompt is outside the vocabulary; "
        f"{model.model_id} has ids 0 to {model.vocab_size - 1}"
    )


def _render(conversation: inference_pb2.Messages, model: ServedModel) -> str:
    if model.chat_template is None:
        raise InvalidRequestError(
            f"{model.model_id} has no chat template, so it takes no messages; "
            "send the prompt as text or token_ids"
        )
    messages = conversation.messages
    if not messages:
        raise InvalidRequestError("the conversation is empty; expected at least one message")
    if len(messages) > MAX_MESSAGES:
        raise RequestTooLongError(
            f"the conversation has {len(messages)} messages; at most {MAX_MESSAGES} are taken"
        )
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise InvalidRequestError(
                f"message {index} has role {message.role[:40]!r}; "
                f"expected one of {', '.join(ROLES)}"
            )
    _require_characters(sum(len(message.content) for message in messages))
    turns = [{"role": message.role, "content": message.content} for message in messages]
    return model.chat_template.render(turns, add_generation_prompt=True)


async def _encode(text: str, model: ServedModel, *, add_special_tokens: bool) -> list[int]:
    if not text:
        raise InvalidRequestError("the prompt is empty; expected at least one token")
    _require_characters(len(text))
    if len(text) > LONG_TEXT:
        return await asyncio.to_thread(
            model.tokenizer.encode, text, add_special_tokens=add_special_tokens
        )
    return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _require_characters(count: int) -> None:
    if count > MAX_CHARACTERS:
        raise RequestTooLongError(
            f"the prompt has {count} characters; at most {MAX_CHARACTERS} are taken"
        )
