"""What a decode worker's engine does around the steps: it owns every request until its last token.

A request's life here:
 1. a Decode call arrives with prefill candidates, or with the reason why there are none;
 2. with a candidate whose link is open it becomes a handoff (decode/handoffs.py); otherwise its
    prompt is computed here, in chunks beside the running batch, and the router is told why;
 3. from its first token on it is one of the running batch until EOS, length, cancel or failure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from decode.handoffs import Handoffs
from decode.links import ReceivingLinks
from decode.streams import DecodeStream, Streams
from tasuki.config import WorkerConfig
from tasuki.engine.connectors import link_settings, make_connector
from tasuki.engine.core import Host
from tasuki.engine.engine import Engine
from tasuki.engine.loop import status_of
from tasuki.errors import QueueFullError, TasukiError, UnavailableError
from tasuki.messages import (
    BeginDrain,
    CancelStream,
    FailedEvent,
    FinishReason,
    KnownPrefillWorkers,
    LinkEnded,
    LinkReceived,
    LoadReport,
    LocalEvent,
    PrefillCallEnded,
    PrefillReply,
    Role,
    StartDecode,
    ToEngine,
)
from tasuki.reasons import AbandonReason
from tasuki.request import Request, RequestStatus
from tasuki.scheduler.output import RequestUpdate
from tasuki.transfer.connector import Connector
from tasuki.transfer.link_events import LinkEvent
from tasuki.transfer.receiving_link import ReceivingLink


class DecodeCore:
    def __init__(
        self,
        engine: Engine,
        config: WorkerConfig,
        epoch: int,
        host: Host,
        connector: Connector | None = None,
    ) -> None:
        self.engine = engine
        self.config = config
        self.epoch = epoch
        self.host = host
        self.draining = False
        self.connector = connector or make_connector(config)
        self.streams = Streams(host)
        self.links = ReceivingLinks(
            engine.cache,
            self.connector,
            link_settings(config, epoch, engine.identity),
            host,
            host.deliver,
            self._on_link_event,
            host.clock,
        )
        self.handoffs = Handoffs(
            engine,
            config,
            epoch,
            host,
            self.streams,
            usable_link=lambda stream: self.links.usable(stream.candidates),
            compute_locally=self._compute_locally,
        )

    # --- messages -------------------------------------------------------------------------------

    def handle(self, message: ToEngine, now: float) -> None:
        match message:
            case StartDecode():
                self._start(message, now)
            case CancelStream():
                self._cancel(message, now)
            case PrefillReply():
                self.handoffs.on_reply(message.handoff_id, message.event, now)
            case PrefillCallEnded():
                self.handoffs.on_call_ended(message.handoff_id, message.error, now)
            case KnownPrefillWorkers():
                self.links.know(message.workers)
            case LinkReceived():
                self.links.receive(message.link_id, message.message)
            case LinkEnded():
                self.links.end(message.link_id)
            case BeginDrain():
                self.draining = True
            case _:
                raise AssertionError(f"a decode engine does not take {type(message).__name__}")

    def _start(self, message: StartDecode, now: float) -> None:
        try:
            stream = self._admit(message, now)
        except TasukiError as error:
            self.host.emit(message.stream_id, FailedEvent(error=status_of(error)))
            return
        self.streams.open(stream)
        if stream.request.finish_reason is not None:
            self.streams.finish(stream, stream.request)  # only its end was missing
        elif stream.candidates:
            self.handoffs.request(stream, now)
        else:
            self._compute_locally(stream, message.request.local_reason or "no_prefill_worker", now)

    def _admit(self, message: StartDecode, now: float) -> DecodeStream:
        asked = message.request
        if self.draining:
            raise UnavailableError("this worker is draining; try another", reason="draining")
        if (
            len(self.engine.scheduler.waiting) + self.handoffs.num_waiting
            >= self.config.max_waiting
        ):
            raise QueueFullError(
                f"{self.config.max_waiting} requests wait here already; try another worker or later"
            )
        request = Request(
            key=message.stream_id,
            request_id=asked.request_id,
            prompt_token_ids=asked.prompt_token_ids,
            sampling=asked.sampling,
            eos_token_ids=self.engine.model.config.eos_token_ids,
            arrived=now,
            output_token_ids=list(asked.output_token_ids),
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            sample_index=asked.sample_index,
        )
        if asked.output_token_ids:
            request.finish_reason = request.reason_to_stop(self.engine.max_model_len)
        if request.finish_reason is None:
            self.engine.validate(asked.prompt_token_ids, asked.sampling, asked.output_token_ids)
        return DecodeStream(
            message.stream_id,
            request,
            seen=now,
            # tokens that another worker already gave are recomputed here, not prefilled elsewhere
            candidates=[] if asked.output_token_ids else asked.prefill_candidates,
            samples_left=request.num_choices,
        )

    def _compute_locally(self, stream: DecodeStream, reason: str, now: float) -> None:
        self.host.emit(stream.stream_id, LocalEvent(reason=reason))
        stream.reservation = now - stream.seen
        stream.queued_at = now
        self.engine.scheduler.add(stream.request, now)

    def _cancel(self, message: CancelStream, now: float) -> None:
        stream = self.streams.get(message.stream_id)
        if stream is None:
            return
        self.streams.drop(stream)
        if stream.request.status is RequestStatus.PARKED:
            late = message.reason is FinishReason.DEADLINE
            reason = AbandonReason.DEADLINE if late else AbandonReason.CANCELLED
            self.handoffs.drop(stream, reason, now)
        for request in stream.requests:
            if request.status is RequestStatus.PARKED:
                request.status = RequestStatus.FINISHED
            else:
                self.engine.scheduler.cancel(request, message.reason)

    # --- steps ------------------------------------------------------------------------------------

    def advance(self, updates: Sequence[RequestUpdate], now: float) -> None:
        for update in updates:
            request = update.request
            stream = self.streams.get(request.group_key)
            if stream is None or not update.token_ids:
                continue
            self.streams.tell_tokens(
                stream, request, update.token_ids, now, update.logprobs, update.prompt_logprobs
            )
            if request.finish_reason is not None:
                self.streams.finish(stream, request)
        self.handoffs.grant(now)

    def _on_link_event(self, link: ReceivingLink, event: LinkEvent) -> None:
        self.handoffs.on_link_event(link, event, self.host.clock())

    # --- state ----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        pulse = self.host.pulse
        self.links.tick(pulse.steps, pulse.age(now))
        self.handoffs.tick(now)
        metrics, waiting = self.host.metrics, self.engine.scheduler.waiting
        metrics.level("waiting_requests", len(waiting) + self.handoffs.num_waiting)
        ages = [now - request.arrived for request in waiting]
        metrics.level("oldest_waiting_seconds", max([*ages, self.handoffs.oldest_wait(now)]))
        for state, count in self.handoffs.counts().items():
            metrics.level("handoffs", count, state=state)
        reports = self.links.reports()
        for state in ("opening", "open", "failed"):
            metrics.level("links", sum(link.state == state for link in reports), state=state)
        stale = self.engine.scheduler.stale_results + self.handoffs.stale + self.links.stale
        metrics.total("stale_results_dropped_total", stale)

    def report(self, now: float) -> LoadReport:
        scheduler, pool = self.engine.scheduler, self.engine.blocks.pool
        return LoadReport(
            worker_id=self.config.worker_id,
            worker_epoch=self.epoch,
            role=Role.DECODE,
            ready=not self.draining,
            draining=self.draining,
            free_blocks=pool.num_free,
            total_blocks=pool.num_blocks,
            queued_tokens=scheduler.queued_tokens,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + self.handoffs.num_waiting,
            prefill_tokens_per_second=self.engine.prefill_tokens_per_second,
            links=self.links.reports(),
        )

    def live_keys(self) -> Iterator[int]:
        yield from self.handoffs.live_keys()

    @property
    def is_idle(self) -> bool:
        return len(self.streams) == 0

    def close(self) -> None:
        self.links.close()

    def check_integrity(self) -> None:
        self.engine.check_integrity()
        self.handoffs.check_integrity()
        for link in self.links:
            link.check_integrity()
