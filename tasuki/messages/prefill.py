"""What a decode worker asks of a prefill worker, and what comes back on that stream."""

from __future__ import annotations

import msgspec

from tasuki.messages.base import Message
from tasuki.messages.decode import FailedEvent
from tasuki.messages.sampling import SamplingParams, TokenLogprob


class PrefillRequest(Message, frozen=True):
    request_id: str
    handoff_id: str  # 32 hex digits, new for every attempt
    link_id: str
    prefill_epoch: int  # the caller's idea of both epochs: a mismatch is refused
    decode_worker_id: str
    decode_epoch: int
    prompt_token_ids: list[int]
    first_block: int  # first logical block the decode worker needs
    sampling: SamplingParams
    timeout: float | None = None
    priority: int = 0
    cache_salt: str = ""


class AcceptedEvent(Message, frozen=True):
    queued_tokens: int  # prompt tokens that stand before this one


class ProgressEvent(Message, frozen=True):
    computed_tokens: int


class FirstTokenEvent(Message, frozen=True):
    token_ids: list[int]  # one for each sample
    cached_tokens: int
    queue_seconds: float  # accepted -> first scheduled
    compute_seconds: float  # first scheduled -> first token sampled
    # one for each of these tokens if asked for, else none
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)
    # of every prompt token but the first, if asked for
    prompt_logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)


class PrefillDoneEvent(Message, frozen=True):
    """Every segment was announced and received; the stream ends well."""


PrefillEvent = AcceptedEvent | ProgressEvent | FirstTokenEvent | PrefillDoneEvent | FailedEvent
