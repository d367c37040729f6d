"""What a prefill worker's engine does around the steps. Torch-free logic over links and scheduler.

A prompt's life here:
 1. a Prefill call arrives; a stale epoch, an unknown link or a full queue refuses it at once;
 2. Accepted; it waits until the whole prompt fits into the cache, and is then computed in chunks;
 3. after every chunk the blocks that are complete are offered to the link, while the next one
    computes;
 4. the first token is sampled here and sent at once; the last block follows with a clean tail;
    Commit;
 5. when every announced segment was received, the blocks are freed and the call ends.
When the call ends early, whatever the reason, compute stops, and the blocks are freed as soon as
what was announced has been received or the link is fenced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec

from prefill.jobs import Job
from prefill.links import SendingLinks
from tasuki.config import WorkerConfig
from tasuki.engine.connectors import link_settings, make_connector
from tasuki.engine.core import Host
from tasuki.engine.engine import Engine
from tasuki.engine.loop import status_of
from tasuki.errors import QueueFullError, TasukiError, TransferError, UnavailableError
from tasuki.messages import (
    AcceptedEvent,
    BeginDrain,
    CancelStream,
    FailedEvent,
    FinishReason,
    FirstTokenEvent,
    LinkEnded,
    LinkReceived,
    LinkReport,
    LinkStarted,
    LoadReport,
    PrefillDoneEvent,
    ProgressEvent,
    Role,
    StartPrefill,
    ToEngine,
)
from tasuki.reasons import AbandonReason
from tasuki.request import Request, RequestStatus
from tasuki.scheduler.output import RequestUpdate
from tasuki.transfer.connector import Connector
from tasuki.transfer.link_events import HandoffDrained, LinkEvent, LinkFailed, SegmentSent
from tasuki.transfer.sending_link import SendingLink


class PrefillCore:
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
        self._jobs: dict[int, Job] = {}  # by stream, which is also the request's key
        self._by_handoff: dict[str, Job] = {}
        self.links = SendingLinks(
            engine.cache,
            self.connector,
            link_settings(config, epoch, engine.identity),
            host,
            host.deliver,
            self._on_link_event,
            host.clock,
        )

    # --- messages -------------------------------------------------------------------------------

    def handle(self, message: ToEngine, now: float) -> None:
        match message:
            case StartPrefill():
                self._start(message, now)
            case CancelStream():
                self._cancel(message)
            case LinkStarted():
                self.links.start(message.link_id)
            case LinkReceived():
                self.links.receive(message.link_id, message.message)
            case LinkEnded():
                self.links.end(message.link_id)
            case BeginDrain():
                self.draining = True
            case _:
                raise AssertionError(f"a prefill engine does not take {type(message).__name__}")

    def _start(self, message: StartPrefill, now: float) -> None:
        try:
            job = self._admit(message, now)
        except TasukiError as error:
            self.host.emit(message.stream_id, FailedEvent(error=status_of(error)))
            return
        queued = self.engine.scheduler.queued_tokens
        self._jobs[job.stream_id] = self._by_handoff[job.asked.handoff_id] = job
        job.link.begin(
            job.asked.handoff_id,
            job.asked.first_block,
            self.engine.cache.layout.blocks_for(job.request.prompt_len) - job.asked.first_block,
        )
        self.engine.scheduler.add(job.request, now)
        self.host.emit(job.stream_id, AcceptedEvent(queued_tokens=queued))

    def _admit(self, message: StartPrefill, now: float) -> Job:
        asked = message.request
        link = self.links.get(asked.link_id)
        if self.draining:
            raise UnavailableError("this worker is draining; try another", reason="draining")
        if asked.prefill_epoch != self.epoch:
            raise TransferError(
                f"the call is for epoch {asked.prefill_epoch:016x} of this worker, which has "
                f"{self.epoch:016x}: its engine was restarted; wait for the new link"
            )
        if link is None or link.state == "failed":  # the peer may see it open before we do
            raise TransferError(f"link {asked.link_id} does not exist here; open a new one")
        if asked.handoff_id in self._by_handoff:
            raise TransferError(f"handoff {asked.handoff_id} exists already; draw a new id")
        if len(self.engine.scheduler.waiting) >= self.config.max_waiting:
            raise QueueFullError(
                f"{self.config.max_waiting} prompts wait here already; try another worker or later"
            )
        sampling = asked.sampling
        first_only = msgspec.structs.replace(
            sampling, max_tokens=1, min_tokens=min(sampling.min_tokens, 1)
        )
        self.engine.validate(asked.prompt_token_ids, first_only)
        blocks = self.engine.cache.layout.blocks_for(len(asked.prompt_token_ids))
        if not 0 <= asked.first_block <= blocks:
            raise TransferError(f"first_block is {asked.first_block} of {blocks} blocks")
        request = Request(
            key=message.stream_id,
            request_id=asked.request_id,
            prompt_token_ids=asked.prompt_token_ids,
            sampling=first_only,
            eos_token_ids=self.engine.model.config.eos_token_ids,
            arrived=now,
            holds_blocks=True,
            priority=asked.priority,
            cache_salt=asked.cache_salt,
        )
        at_end = request.prompt_len + 1 >= self.engine.max_model_len
        sends = sampling.max_tokens > 1 and not at_end
        return Job(message.stream_id, asked, request, link, now, sends, asked.first_block)

    def _cancel(self, message: CancelStream) -> None:
        job = self._jobs.get(message.stream_id)
        if job is None:
            return
        job.told = True  # nobody listens any more
        # compute stops; the blocks come home when the link has nothing of it outstanding
        self.engine.scheduler.cancel(job.request, FinishReason.CANCELLED)
        job.link.abandon(job.asked.handoff_id, AbandonReason.CANCELLED)
        self._settle(job)

    # --- steps ------------------------------------------------------------------------------------

    def advance(self, updates: Sequence[RequestUpdate], now: float) -> None:
        for key, group in groupby(updates, lambda update: update.request.group_key):
            job, samples = self._jobs.get(key), list(group)
            if job is None:
                continue
            if samples[0].token_ids:
                self._first_token(job, samples, now)
                continue
            self.host.emit(
                job.stream_id, ProgressEvent(computed_tokens=job.request.num_computed_tokens)
            )
            self._offer(job, job.request.num_computed_tokens // self._block_size)

    @property
    def _block_size(self) -> int:
        return self.engine.cache.layout.block_size

    def _offer(self, job: Job, complete: int) -> None:
        """Offer the blocks before logical block `complete` that were not offered yet."""
        if not job.sends or complete <= job.next_block:
            return
        table = self.engine.blocks.table(job.request.key)
        job.link.offer(job.asked.handoff_id, job.next_block, table[job.next_block : complete])
        job.next_block = complete

    def _first_token(self, job: Job, samples: Sequence[RequestUpdate], now: float) -> None:
        """One update for each sample."""
        request, token_ids = job.request, [update.token_ids[0] for update in samples]
        scheduled = request.first_scheduled if request.first_scheduled is not None else now
        self.host.emit(
            job.stream_id,
            FirstTokenEvent(
                token_ids=token_ids,
                cached_tokens=request.cached_tokens,
                queue_seconds=scheduled - job.accepted_at,
                compute_seconds=now - scheduled,
                logprobs=[logprob for update in samples for logprob in update.logprobs],
                prompt_logprobs=samples[0].prompt_logprobs,
            ),
        )
        self.host.flush_events()  # before the KV: the client's first token waits for nothing
        computed = request.prompt_len - request.cached_tokens
        self.host.metrics.add("prefill_tokens_total", computed, kind="computed")
        self.host.metrics.add("prefill_tokens_total", request.cached_tokens, kind="cached")
        self.host.metrics.observe("prefill_seconds", now - scheduled)
        if not job.sends or all(map(request.is_stop, token_ids)):  # nobody needs the KV
            job.link.abandon(job.asked.handoff_id, AbandonReason.FINISHED)
        else:
            tail = request.prompt_len % self._block_size
            if tail:
                last = self.engine.blocks.table(request.key)[-1]
                self.engine.cache.zero_tail(last, tail)
            self._offer(job, self.engine.cache.layout.blocks_for(request.prompt_len))
            job.link.commit(job.asked.handoff_id, request.prompt_len)
        self._settle(job)

    # --- links ------------------------------------------------------------------------------------

    def _on_link_event(self, link: SendingLink, event: LinkEvent) -> None:
        match event:
            case SegmentSent():
                self.host.metrics.add("kv_sent_bytes_total", event.nbytes)
            case HandoffDrained():
                job = self._by_handoff.get(event.handoff_id)
                if job is not None:
                    job.drained = True
                    self._settle(job)
            case LinkFailed():
                for job in [job for job in self._jobs.values() if job.link is link]:
                    self._lose_link(job, event)
            case _:
                pass

    def _lose_link(self, job: Job, event: LinkFailed) -> None:
        if not job.told:
            error = TransferError(event.message, reason="link_down")
            self.host.emit(job.stream_id, FailedEvent(error=status_of(error)))
            job.told = True
        job.drained = True  # the link is fenced
        self.engine.scheduler.cancel(job.request, FinishReason.CANCELLED)
        self._settle(job)

    def _settle(self, job: Job) -> None:
        """End the job once it is computed or given up and nothing of it is outstanding."""
        if job.request.status is not RequestStatus.FINISHED or job.stream_id not in self._jobs:
            return
        if not job.drained:
            return
        del self._jobs[job.stream_id], self._by_handoff[job.asked.handoff_id]
        self.engine.scheduler.release(job.request)
        if not job.told:
            self.host.emit(job.stream_id, PrefillDoneEvent())

    # --- state ----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        pulse = self.host.pulse
        self.links.tick(pulse.steps, pulse.age(now))
        metrics, waiting = self.host.metrics, self.engine.scheduler.waiting
        metrics.level("waiting_requests", len(waiting))
        oldest = max((now - request.arrived for request in waiting), default=0.0)
        metrics.level("oldest_waiting_seconds", oldest)
        for state in ("opening", "open", "failed"):
            metrics.level("links", sum(link.state == state for link in self.links), state=state)
        metrics.level("prefill_queue_tokens", self.engine.scheduler.queued_tokens)
        metrics.total("stale_results_dropped_total", self.links.stale)

    def report(self, now: float) -> LoadReport:
        scheduler, pool = self.engine.scheduler, self.engine.blocks.pool
        return LoadReport(
            worker_id=self.config.worker_id,
            worker_epoch=self.epoch,
            role=Role.PREFILL,
            ready=not self.draining,
            draining=self.draining,
            free_blocks=pool.num_free,
            total_blocks=pool.num_blocks,
            queued_tokens=scheduler.queued_tokens,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            prefill_tokens_per_second=self.engine.prefill_tokens_per_second,
            links=[
                LinkReport(
                    worker_id=link.peer.worker_id,
                    worker_epoch=link.peer.worker_epoch,
                    state=link.state,
                )
                for link in self.links
                if link.peer is not None
            ],
        )

    def live_keys(self) -> Iterator[int]:
        yield from self._jobs

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    def close(self) -> None:
        self.links.close()

    def check_integrity(self) -> None:
        self.engine.check_integrity()
        assert len(self._jobs) == len(self._by_handoff)
        for link in self.links:
            link.check_integrity()
