"""The live Decode streams of one decode worker, and everything that is ever said on them.

Knows nothing about links or blocks. A stream gets its tokens in order, each once, and exactly one
end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tasuki.engine.core import Host
from tasuki.engine.loop import status_of
from tasuki.errors import TasukiError
from tasuki.messages import (
    FailedEvent,
    FinishedEvent,
    FinishReason,
    FirstTokenParts,
    HandoffTimings,
    PrefillTarget,
    TokenLogprob,
    TokensEvent,
)
from tasuki.request import Request
from tasuki.transfer.handoff import Handoff, HandoffState
from tasuki.transfer.receiving_link import ReceivingLink


@dataclass(frozen=True)
class Dispatch:
    """One attempt to have the prompt computed elsewhere."""

    handoff: Handoff
    link: ReceivingLink
    target: PrefillTarget
    at: float


@dataclass(eq=False)
class DecodeStream:
    stream_id: int  # also the request's key in the engine
    request: Request  # its first sample
    seen: float
    candidates: list[PrefillTarget]
    dispatch: Dispatch | None = None  # while a prefill worker is at it
    cached_tokens: int | None = None  # as the prefill worker said, if one computed the prompt
    # where the time to the first token went
    reservation: float = 0.0
    prefill_queue: float = 0.0
    prefill_compute: float = 0.0
    fallback: float = 0.0
    fell_back: bool = False
    queued_at: float | None = None  # handed to the scheduler with a prompt to compute
    # the second token
    first_token_at: float | None = None
    decode_from: float | None = None  # the handoff was committed; local: the first token
    first_decode: float = 0.0
    transfer: HandoffTimings = field(default_factory=HandoffTimings)
    samples_left: int = 1  # those that have not ended

    @property
    def handoff_state(self) -> HandoffState | None:
        """Of the handoff that goes on, or how the last one ended; None: there was none."""
        if self.dispatch is not None:
            return self.dispatch.handoff.state
        if self.fell_back:
            return HandoffState.ABANDONED
        return HandoffState.COMMITTED if self.transfer.blocks else None

    def tried(self, target: PrefillTarget) -> None:
        """Those up to this candidate are not asked again."""
        ids = [candidate.worker_id for candidate in self.candidates]
        self.candidates = self.candidates[ids.index(target.worker_id) + 1 :]

    @property
    def requests(self) -> list[Request]:
        """All samples, as far as they are known."""
        return [self.request, *self.request.other_samples]

    @property
    def prompt_tokens_cached(self) -> int:
        """Prompt tokens that nobody had to compute."""
        own = self.request.cached_tokens
        return own if self.cached_tokens is None else self.cached_tokens


class Streams:
    def __init__(self, host: Host) -> None:
        self._host = host
        self._streams: dict[int, DecodeStream] = {}

    def __iter__(self) -> Iterator[DecodeStream]:
        return iter(list(self._streams.values()))

    def __len__(self) -> int:
        return len(self._streams)

    def get(self, stream_id: int) -> DecodeStream | None:
        return self._streams.get(stream_id)

    def open(self, stream: DecodeStream) -> None:
        self._streams[stream.stream_id] = stream

    def drop(self, stream: DecodeStream) -> None:
        """Nobody listens any more."""
        self._streams.pop(stream.stream_id, None)

    def tell_tokens(
        self,
        stream: DecodeStream,
        request: Request,
        token_ids: list[int],
        now: float,
        logprobs: Sequence[TokenLogprob] = (),
        prompt_logprobs: Sequence[TokenLogprob] = (),
    ) -> None:
        """The latest tokens of one of the stream's requests, and what was asked for beside them."""
        parts, cached, computed = None, 0, 0
        index = len(request.output_token_ids) - len(token_ids)
        if index == 0 and request is stream.request:
            parts = self._first_parts(stream, now)
            cached = stream.prompt_tokens_cached
            computed = stream.request.computed_prompt_tokens
        elif index > 0 and stream.decode_from is not None and not stream.first_decode:
            stream.first_decode = now - stream.decode_from
        event = TokensEvent(
            index=index,
            token_ids=token_ids,
            offsets=[now - stream.seen] * len(token_ids),
            logprobs=list(logprobs),
            parts=parts,
            cached_tokens=cached,
            computed_prompt_tokens=computed,
            prompt_logprobs=list(prompt_logprobs),
            sample_index=request.sample_index,
        )
        self._host.emit(stream.stream_id, event)
        if prompt_logprobs:
            self._host.flush_events()  # those of one prompt may fill a quarter of a frame

    def _first_parts(self, stream: DecodeStream, now: float) -> FirstTokenParts:
        stream.first_token_at = now
        if stream.queued_at is not None:  # the prompt, or its rest, was computed here
            scheduled = stream.request.first_scheduled
            scheduled = now if scheduled is None else scheduled
            stream.prefill_queue = scheduled - stream.queued_at
            stream.prefill_compute = now - scheduled
            stream.decode_from = now
        return FirstTokenParts(
            reservation=stream.reservation,
            prefill_queue=stream.prefill_queue,
            prefill_compute=stream.prefill_compute,
            fallback=stream.fallback,
        )

    def finish(self, stream: DecodeStream, request: Request) -> None:
        """One of the stream's requests has ended; with the last one the stream ends."""
        transfer = stream.transfer
        stream.samples_left -= 1
        event = FinishedEvent(
            finish_reason=request.finish_reason or FinishReason.ERROR,
            prompt_tokens=request.prompt_len,
            output_tokens=len(request.output_token_ids),
            cached_tokens=stream.prompt_tokens_cached,
            computed_prompt_tokens=sum(one.computed_prompt_tokens for one in stream.requests),
            handoff=HandoffTimings(
                transfer=transfer.transfer,
                exposed_transfer=transfer.exposed_transfer,
                commit_wait=transfer.commit_wait,
                first_decode=stream.first_decode,
                nbytes=transfer.nbytes,
                blocks=transfer.blocks,
            ),
            preemptions=request.preemptions,
            stop_token_id=request.stop_token_id,
            sample_index=request.sample_index,
            samples_left=stream.samples_left,
        )
        self._host.emit(stream.stream_id, event)
        if not stream.samples_left:
            self.drop(stream)

    def fail(self, stream: DecodeStream, error: TasukiError) -> None:
        self._host.emit(stream.stream_id, FailedEvent(error=status_of(error)))
        self.drop(stream)
