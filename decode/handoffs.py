"""The handoffs of a decode worker: reserve, dispatch, commit, or fall back.

 1. blocks for the whole prompt and the first generated token are reserved, in order of arrival and
    only while growth room remains; no blocks in time is an error before any token was sent;
 2. the prompt is dispatched to the first candidate with an open link;
 3. the first token goes to the client at once; the KV follows, block by block;
 4. committed: every block has arrived and the first token is known; the request joins the batch;
 5. a prefill worker that refuses or is lost before the first token is replaced by the next one;
 6. anything else is a fallback: what arrived is kept, the rest of the prompt is computed here.
Knows nothing about sampling or about how streams are written.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator

from decode.endings import LINK_FAILURES, LOCAL_ENDINGS, RETRIED, fallback_reason
from decode.first_tokens import can_be
from decode.streams import DecodeStream, Dispatch, Streams
from tasuki.config import WorkerConfig
from tasuki.engine.core import Host
from tasuki.engine.engine import Engine
from tasuki.errors import NoKVError
from tasuki.kv.manager import Prefix
from tasuki.messages import (
    AcceptedEvent,
    CallPrefill,
    CancelPrefillCall,
    DispatchedEvent,
    ErrorStatus,
    FailedEvent,
    FallbackEvent,
    FirstTokenEvent,
    HandoffTimings,
    PrefillEvent,
    PrefillRequest,
    ProgressEvent,
)
from tasuki.reasons import AbandonReason, PlacementReason
from tasuki.request import Request, RequestStatus
from tasuki.transfer.handoff import Handoff, HandoffState
from tasuki.transfer.link_events import (
    BlocksReleased,
    CommitSeen,
    DigestMismatch,
    LinkEvent,
    LinkFailed,
    PeerAbandoned,
    SegmentReceived,
)
from tasuki.transfer.receiving_link import ReceivingLink


class Handoffs:
    def __init__(
        self,
        engine: Engine,
        config: WorkerConfig,
        epoch: int,
        host: Host,
        streams: Streams,
        usable_link: Callable[[DecodeStream], ReceivingLink | None],
        compute_locally: Callable[[DecodeStream, str, float], None],
    ) -> None:
        self._engine = engine
        self._config = config
        self._epoch = epoch
        self._host = host
        self._streams = streams
        self._usable_link = usable_link
        self._compute_locally = compute_locally
        self._waiting: deque[DecodeStream] = deque()  # for a reservation
        self._dispatched: dict[str, DecodeStream] = {}
        self.stale = 0

    # --- reserve and dispatch -------------------------------------------------------------------

    def request(self, stream: DecodeStream, now: float) -> None:
        """Queue for a reservation, in order of arrival."""
        stream.request.status = RequestStatus.PARKED
        self._waiting.append(stream)
        self.grant(now)

    def grant(self, now: float) -> None:
        """Give reservations to those that wait, in order, while there is room."""
        while self._waiting:
            stream = self._waiting[0]
            link = self._usable_link(stream)
            if link is None:
                self._waiting.popleft()
                self._compute_locally(stream, "link_down", now)
                continue
            known = self._engine.blocks.match(stream.request)
            if known.num_tokens > 0 and self._is_short(stream.request, known):
                self._waiting.popleft()
                self._compute_locally(stream, PlacementReason.PREFIX_CACHED, now)
                continue
            if not self._engine.scheduler.reserve(stream.request, known):
                break
            self._waiting.popleft()
            stream.reservation = now - stream.seen
            self._dispatch(stream, link, len(known.block_ids), now)
        while self._waiting and now - self._waiting[0].seen >= self._config.reserve_timeout:
            stream = self._waiting.popleft()
            self._engine.scheduler.unreserve(stream.request.key)
            needed = self._engine.cache.layout.blocks_for(stream.request.prompt_len + 1)
            self._streams.fail(
                stream,
                NoKVError(
                    f"no {needed} KV blocks became free within {self._config.reserve_timeout} s "
                    f"({self._engine.blocks.num_free} are); try another worker or later"
                ),
            )

    def _is_short(self, request: Request, known: Prefix) -> bool:
        """Whether so little of the prompt is not cached here that asking elsewhere is no gain."""
        rest = request.prompt_len - known.num_tokens
        return known.copies_last or rest <= self._config.short_rest_tokens

    def _dispatch(
        self, stream: DecodeStream, link: ReceivingLink, first_block: int, now: float
    ) -> None:
        """Ask for the blocks from `first_block` on; those before are here."""
        request = stream.request
        stream.tried(link.target)
        end = self._engine.cache.layout.blocks_for(request.prompt_len)
        handoff = Handoff(
            secrets.token_hex(16),
            request.request_id,
            link.link_id,
            first_block,
            end - first_block,
            now=now,
            progress_timeout=self._config.handoff_timeout,
            reserve_timeout=self._config.reserve_timeout,
        )
        stream.dispatch = Dispatch(handoff, link, link.target, now)
        self._dispatched[handoff.handoff_id] = stream
        link.expect(handoff, self._engine.blocks.table(request.key)[first_block:end])
        handoff.dispatch(now)
        self._host.emit(stream.stream_id, DispatchedEvent(prefill_worker_id=link.target.worker_id))
        self._host.deliver(
            CallPrefill(
                target=link.target,
                request=PrefillRequest(
                    request_id=request.request_id,
                    handoff_id=handoff.handoff_id,
                    link_id=link.link_id,
                    prefill_epoch=link.target.worker_epoch,
                    decode_worker_id=self._config.worker_id,
                    decode_epoch=self._epoch,
                    prompt_token_ids=request.prompt_token_ids,
                    first_block=first_block,
                    sampling=request.sampling,
                    priority=request.priority,
                    cache_salt=request.cache_salt,
                ),
            )
        )

    # --- what the prefill worker says -------------------------------------------------------------

    def on_reply(self, handoff_id: str, event: PrefillEvent, now: float) -> None:
        stream = self._dispatched.get(handoff_id)
        if stream is None or stream.dispatch is None:
            self.stale += 1
            return
        handoff = stream.dispatch.handoff
        match event:
            case AcceptedEvent():
                handoff.accept(now)
            case ProgressEvent():
                handoff.progress(now)
            case FirstTokenEvent():
                self._on_first_token(stream, stream.dispatch, event, now)
            case FailedEvent():
                self.on_call_ended(handoff_id, event.error, now)
            case _:
                pass

    def _on_first_token(
        self, stream: DecodeStream, dispatch: Dispatch, event: FirstTokenEvent, now: float
    ) -> None:
        if stream.request.output_token_ids:
            self.stale += 1  # said twice: the first one is final
            return
        if not can_be(event, stream.request, self._engine.model.config.vocab_size):
            self.fall_back(stream, AbandonReason.REFUSED, now)  # it knows no samples, say
            return
        dispatch.handoff.first_token(now)
        stream.cached_tokens = event.cached_tokens
        stream.prefill_queue, stream.prefill_compute = event.queue_seconds, event.compute_seconds
        self._tell_first_tokens(stream, event, now)
        if stream.samples_left:
            self._join(stream, dispatch, now)
        else:
            self.drop(stream, AbandonReason.FINISHED, now)
            stream.request.status = RequestStatus.FINISHED

    def _tell_first_tokens(self, stream: DecodeStream, event: FirstTokenEvent, now: float) -> None:
        first, max_model_len = stream.request, self._engine.max_model_len
        first.take_prompt_logprobs()  # they are told now, and not computed here
        first.append(event.token_ids[0], max_model_len)
        requests = [first, *first.split(event.token_ids[1:], max_model_len)]
        for index, (request, token_id) in enumerate(zip(requests, event.token_ids, strict=True)):
            of_prompt = [] if index else event.prompt_logprobs
            logprobs = event.logprobs[index : index + 1]
            self._streams.tell_tokens(stream, request, [token_id], now, logprobs, of_prompt)
            if request.finish_reason is not None:
                self._streams.finish(stream, request)

    def on_call_ended(self, handoff_id: str, error: ErrorStatus | None, now: float) -> None:
        """The Prefill call is over. A good end says nothing: Commit is on the link."""
        stream = self._dispatched.get(handoff_id)
        if stream is None or error is None:
            return
        self.fall_back(stream, fallback_reason(error), now, call_is_over=True)

    def on_link_event(self, link: ReceivingLink, event: LinkEvent, now: float) -> None:
        match event:
            case SegmentReceived() | CommitSeen():
                stream = self._dispatched.get(event.handoff_id)
                if isinstance(event, SegmentReceived):
                    self._host.metrics.add("kv_received_bytes_total", event.nbytes)
                if stream is not None and stream.dispatch is not None:
                    self._join(stream, stream.dispatch, now)
            case DigestMismatch():
                stream = self._dispatched.get(event.handoff_id)
                if stream is not None:
                    self.fall_back(stream, AbandonReason.DIGEST, now)
            case PeerAbandoned():
                stream = self._dispatched.get(event.handoff_id)
                if stream is not None and event.reason != "finished":
                    self.fall_back(stream, AbandonReason.PREFILL_DIED, now)
            case BlocksReleased():
                self._engine.blocks.release(event.block_ids)
            case LinkFailed():
                self._lose_link(link, event, now)
            case _:
                pass

    def _lose_link(self, link: ReceivingLink, event: LinkFailed, now: float) -> None:
        """All that needed it falls back. What is committed has no more need of it."""
        for stream in list(self._dispatched.values()):
            dispatch = stream.dispatch
            if dispatch is None or dispatch.link is not link or dispatch.handoff.is_committed:
                continue
            self.fall_back(stream, LINK_FAILURES.get(event.reason, AbandonReason.LINK_DOWN), now)
        self._engine.blocks.release(event.released_block_ids)

    def tick(self, now: float) -> None:
        """Give up handoffs that make no progress."""
        for stream in list(self._dispatched.values()):
            if stream.dispatch is not None and stream.dispatch.handoff.expired(now):
                self.fall_back(stream, AbandonReason.STALLED, now)
        self.grant(now)

    # --- the end of a handoff -------------------------------------------------------------------

    def _join(self, stream: DecodeStream, dispatch: Dispatch, now: float) -> None:
        """Committed and the first token known: the request may decode."""
        handoff, request = dispatch.handoff, stream.request
        if not (handoff.is_committed and request.output_token_ids):
            return
        self._forget(stream, dispatch)
        dispatch.link.forget(handoff.handoff_id)
        self._engine.blocks.commit(request.key)
        request.num_computed_tokens = request.prompt_len
        self._engine.blocks.publish(request)
        stream.decode_from = now
        pieces = handoff.timings()
        nbytes = handoff.num_blocks * self._engine.cache.layout.block_bytes
        stream.transfer = HandoffTimings(
            transfer=pieces.transfer,
            exposed_transfer=pieces.exposed_transfer,
            commit_wait=pieces.commit_wait,
            nbytes=nbytes,
            blocks=handoff.num_blocks,
        )
        metrics = self._host.metrics
        metrics.observe("kv_transfer_seconds", pieces.transfer)
        metrics.observe("kv_transfer_exposed_seconds", pieces.exposed_transfer + pieces.commit_wait)
        metrics.observe("kv_transfer_bytes", nbytes)
        self._engine.scheduler.adopt(request)

    def fall_back(
        self,
        stream: DecodeStream,
        reason: AbandonReason,
        now: float,
        *,
        call_is_over: bool = False,
    ) -> None:
        """Keep what arrived, and have the rest of the prompt computed by the next candidate, if
        there is one and no token is known yet, or here.
        """
        dispatch = stream.dispatch
        assert dispatch is not None
        handoff, request = dispatch.handoff, stream.request
        layout = self._engine.cache.layout
        self._host.metrics.add("kv_transfer_failures_total", reason=reason)
        # logprobs of the prompt that have not come need all of it computed
        kept = request.prompt_logprobs is None
        run = handoff.first_block + handoff.received_run if kept else 0
        handoff.abandon(reason, now)
        in_flight = dispatch.link.abandon(handoff.handoff_id, reason)
        self._forget(stream, dispatch)
        if not call_is_over:
            self._host.deliver(CancelPrefillCall(handoff_id=handoff.handoff_id))
        if not request.output_token_ids:
            stream.fallback += now - dispatch.at
            rest = request.prompt_len - run * layout.block_size
            link = self._usable_link(stream) if reason in RETRIED else None
            enough = rest > self._config.short_rest_tokens
            if link is not None and enough and self._engine.blocks.replace(request.key, in_flight):
                self._dispatch(stream, link, run, now)  # nothing of it was told: it may be retried
                return
        self._engine.blocks.abandon(request.key, run, in_flight)
        known = request.num_tokens - 1  # the last known token always has to be computed
        request.num_computed_tokens = min(run * layout.block_size, request.prompt_len, known)
        stream.fell_back = True
        self._host.metrics.add("fallbacks_total", reason=reason)
        event = FallbackEvent(reason=reason, kept_tokens=request.num_computed_tokens)
        self._host.emit(stream.stream_id, event)
        if not request.output_token_ids:
            stream.queued_at = now
        else:
            stream.decode_from = now
        self._resume(request)

    def _resume(self, request: Request) -> None:
        scheduler = self._engine.scheduler
        if self._engine.blocks.table(request.key):
            scheduler.adopt(request)
        elif request.finish_reason is None:
            scheduler.add(request, self._host.clock())
        else:  # only other samples go on
            scheduler.unreserve(request.key)
            request.status = RequestStatus.FINISHED
            scheduler.add(request.heir(), self._host.clock())

    def drop(self, stream: DecodeStream, reason: AbandonReason, now: float) -> None:
        """The request ended while its handoff was going on, or while it waited for one."""
        if stream in self._waiting:
            self._waiting.remove(stream)
            self._engine.scheduler.unreserve(stream.request.key)
            return
        dispatch = stream.dispatch
        if dispatch is None:
            return
        dispatch.handoff.abandon(reason, now)
        in_flight = dispatch.link.abandon(dispatch.handoff.handoff_id, reason)
        self._forget(stream, dispatch)
        self._engine.scheduler.unreserve(stream.request.key, in_flight)
        if reason not in LOCAL_ENDINGS:
            self._host.metrics.add("kv_transfer_failures_total", reason=reason)
        if reason is not AbandonReason.FINISHED:
            self._host.deliver(CancelPrefillCall(handoff_id=dispatch.handoff.handoff_id))

    def _forget(self, stream: DecodeStream, dispatch: Dispatch) -> None:
        for state, seconds in dispatch.handoff.durations(self._host.clock()).items():
            self._host.metrics.observe("handoff_seconds", seconds, state=state)
        del self._dispatched[dispatch.handoff.handoff_id]
        stream.dispatch = None

    # --- state ----------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def oldest_wait(self, now: float) -> float:
        return now - self._waiting[0].seen if self._waiting else 0.0

    def counts(self) -> dict[str, int]:
        """Requests by how far their handoff is: reserved counts those that wait for it as well,
        committed those that decode since, abandoned those that went on here.
        """
        counts = dict.fromkeys((state.value for state in HandoffState), 0)
        counts[HandoffState.RESERVED] = len(self._waiting)
        for stream in self._streams:
            if (state := stream.handoff_state) is not None:
                counts[state] += 1
        return counts

    def live_keys(self) -> Iterator[int]:
        """Requests that hold reserved blocks."""
        yield from (stream.stream_id for stream in self._dispatched.values())

    def check_integrity(self) -> None:
        for handoff_id, stream in self._dispatched.items():
            assert stream.dispatch is not None
            assert stream.dispatch.handoff.handoff_id == handoff_id
            assert stream.request.status is RequestStatus.PARKED
            stream.dispatch.handoff.check_integrity()
