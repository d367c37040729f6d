"""What a router asks of a decode worker, and what comes back on that stream."""

from __future__ import annotations

import msgspec

from tasuki.messages.base import ErrorStatus, FinishReason, Message, PrefillTarget
from tasuki.messages.sampling import SamplingParams, TokenLogprob


class DecodeRequest(Message, frozen=True):
    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]  # what a previous decode worker already gave; empty at first
    sampling: SamplingParams
    prefill_candidates: list[PrefillTarget]  # in order of preference; empty means local
    local_reason: str = ""  # why there are no candidates, as a placement reason
    timeout: float | None = None  # seconds left of the request's own deadline
    priority: int = 0  # lower is more important; counts where the worker orders by it
    cache_salt: str = ""  # requests with different ones share no cached prefix
    sample_index: int = 0  # which sample this is, where one alone goes on


class DispatchedEvent(Message, frozen=True):
    """The prompt went to a prefill worker."""

    prefill_worker_id: str


class LocalEvent(Message, frozen=True):
    """The decode worker computes the prompt itself; `reason` is a placement reason."""

    reason: str


class FallbackEvent(Message, frozen=True):
    """A prefill worker was named, but the rest of the prompt is computed here after all."""

    reason: str
    kept_tokens: int  # prompt tokens whose KV had already arrived and is kept


class FirstTokenParts(Message, frozen=True):
    """Where the time to the first token went, as far as a decode worker can see. Seconds."""

    reservation: float = 0.0  # request seen -> blocks reserved (split) or queued (local)
    prefill_queue: float = 0.0  # waiting for a step, on whichever worker computed the prompt
    prefill_compute: float = 0.0
    fallback: float = 0.0  # spent on a prefill worker that did not deliver


class TokensEvent(Message, frozen=True):
    """Output tokens that became ready together."""

    index: int  # of the first one among the output tokens of its sample
    token_ids: list[int]
    offsets: list[float]  # seconds since this worker saw the request, one per token
    # one per token if asked for, else none
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)
    # with the first token of the first sample only
    parts: FirstTokenParts | None = None
    cached_tokens: int = 0  # as in FinishedEvent: a text stop ends a request before that one comes
    computed_prompt_tokens: int = 0  # likewise
    # of every prompt token but the first, if asked for
    prompt_logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)
    sample_index: int = 0


class HandoffTimings(Message, frozen=True):
    """What a finished request knows about its handoff; zeros for a local one. Seconds and bytes."""

    transfer: float = 0.0  # first Announce seen -> committed
    exposed_transfer: float = 0.0  # FirstToken seen -> last segment received, if later
    commit_wait: float = 0.0  # last segment received (or FirstToken, if later) -> committed
    first_decode: float = 0.0  # committed (local: first token) -> second token
    nbytes: int = 0
    blocks: int = 0


class FinishedEvent(Message, frozen=True):
    """The end of one sample; with that of the last one the stream ends."""

    finish_reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int  # prompt tokens found in a prefix cache
    computed_prompt_tokens: int  # prompt tokens this decode worker computed itself
    handoff: HandoffTimings
    preemptions: int = 0
    stop_token_id: int | None = None  # the one of the request's stop tokens that ended it
    sample_index: int = 0
    samples_left: int = 0  # how many others go on


class FailedEvent(Message, frozen=True):
    """The stream ends with this error."""

    error: ErrorStatus


DecodeEvent = (
    DispatchedEvent | LocalEvent | FallbackEvent | TokensEvent | FinishedEvent | FailedEvent
)
