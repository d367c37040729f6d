"""One worker as a router follows it: its Watch stream, latest load report, and our charges on it.

Knows nothing about requests or about other workers. A task of its own keeps the stream open; while
it is not, nothing is placed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import grpc

from router.ledger import WorkerLedgers
from router.workers.worker_snapshot import WorkerSnapshot
from tasuki.errors import InvalidRequestError, UnavailableError
from tasuki.messages import PrefillTarget, Role
from tasuki.v1 import common_pb2, common_pb2_grpc, worker_pb2, worker_pb2_grpc
from tasuki.wire.watch import WorkerReport, report_from_proto, watch_request_to_proto

log = logging.getLogger(__name__)

RESEND = 5.0  # seconds; a worker drops a prefill worker that no router has named for 30
RESET_SECONDS = 10.0
FIRST_RETRY, LAST_RETRY = 0.05, 1.0  # seconds between attempts to open the stream


class WorkerState(StrEnum):
    CONNECTING = "connecting"  # no report yet, or one that says not ready
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"  # was heard of, and is no longer


@dataclass(frozen=True)
class WatchLimits:
    """Seconds to wait for the first report of a stream, and for every later one."""

    connect: float
    report: float


class WatchError(Exception):
    """A report that shows the process at this address to be the wrong one."""


class WatchedWorker:
    """`key` for charges is any number the caller does not use twice."""

    def __init__(
        self,
        address: str,
        role: Role,
        channel: grpc.aio.Channel,
        *,
        model_id: str,
        limits: WatchLimits,
        on_change: Callable[[], None],
    ) -> None:
        self.address = address
        self.role = role
        self.ledgers = WorkerLedgers()
        self.outstanding: set[int] = set()
        self.stub = worker_pb2_grpc.WorkerStub(channel)
        self.live = False
        self.reports = 0
        # called when nothing is heard of it any more, with for how many seconds that has been so
        self.on_loss: set[Callable[[float], None]] = set()
        self._channel = channel
        self._model_id = model_id
        self._limits = limits
        self._on_change = on_change
        self._report: WorkerReport | None = None
        self._targets: tuple[PrefillTarget, ...] = ()
        self._targets_changed = asyncio.Event()
        self._last_words = ""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._follow(), name=f"watch {self.address}")

    async def close(self) -> None:
        """End the stream and the channel."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        await self._channel.close()

    def announce(self, targets: Sequence[PrefillTarget]) -> None:
        """Send the current prefill workers down, now and every few seconds from now on."""
        if tuple(targets) != self._targets:
            self._targets = tuple(targets)
            self._targets_changed.set()

    async def reset_prefix_cache(self) -> int:
        """How many blocks the worker forgot. Raises UnavailableError."""
        stub = common_pb2_grpc.ServerStub(self._channel)
        request = common_pb2.ResetPrefixCacheRequest()
        try:
            return int((await stub.ResetPrefixCache(request, timeout=RESET_SECONDS)).blocks)
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"{error.code().name}: {error.details()}") from None

    @property
    def state(self) -> WorkerState:
        if self._report is None:
            return WorkerState.CONNECTING
        if not self.live:
            return WorkerState.LOST
        if self._report.load.draining:
            return WorkerState.DRAINING
        return WorkerState.READY if self._report.load.ready else WorkerState.CONNECTING

    @property
    def snapshot(self) -> WorkerSnapshot:
        if self._report is None:
            return WorkerSnapshot(
                address=self.address,
                worker_id=self.address,
                worker_epoch=0,
                role=self.role,
                live=False,
            )
        load = self._report.load
        links = frozenset(
            (link.worker_id, link.worker_epoch) for link in load.links if link.state == "open"
        )
        return WorkerSnapshot(
            address=self.address,
            worker_id=load.worker_id,
            worker_epoch=load.worker_epoch,
            role=self.role,
            live=self.live,
            ready=load.ready,
            draining=load.draining,
            free_blocks=load.free_blocks,
            total_blocks=load.total_blocks,
            block_size=self._report.block_size,
            max_model_len=self._report.max_model_len,
            reported_tokens=load.queued_tokens,
            running=load.running,
            waiting=load.waiting,
            prefill_speed=load.prefill_tokens_per_second,
            open_links=links,
            reports=self.reports,
            charged_blocks=self.ledgers.blocks.total,
            charged_requests=self.ledgers.requests.total,
            charged_tokens=self.ledgers.tokens.total,
            credited_tokens=self.ledgers.tokens.credit,
            outstanding=len(self.outstanding),
        )

    async def _follow(self) -> None:
        """Keep the stream open for ever; pauses between attempts double up to LAST_RETRY."""
        failures = 0
        while True:
            before = self.reports
            why, silent = await self._watch_once()
            if self.live:
                self.live = False
                self._on_change()
                for tell in list(self.on_loss):
                    tell(silent)
            if why != self._last_words:  # once, not once per attempt
                log.warning("watch of %s worker %s ended: %s", self.role, self.address, why)
                self._last_words = why
            failures = 0 if self.reports > before else min(failures + 1, 10)
            await asyncio.sleep(min(FIRST_RETRY * 2**failures, LAST_RETRY))

    async def _watch_once(self) -> tuple[str, float]:
        """One stream, until it ends; returns why it did, and seconds of silence before that."""
        call = self.stub.Watch(self._requests())
        try:
            limit = self._limits.connect
            while True:
                async with asyncio.timeout(limit):
                    report = await call.read()
                if not isinstance(report, worker_pb2.LoadReport):  # EOF
                    return "the worker ended the stream", 0.0
                self._take(report_from_proto(report))
                limit = self._limits.report
        except TimeoutError:
            return f"no load report for {limit} s", limit
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}", 0.0
        except (WatchError, InvalidRequestError) as error:
            return str(error), 0.0
        finally:
            call.cancel()

    async def _requests(self) -> AsyncIterator[worker_pb2.WatchRequest]:
        while True:
            self._targets_changed.clear()
            yield watch_request_to_proto(self._targets)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESEND):
                    await self._targets_changed.wait()

    def _take(self, report: WorkerReport) -> None:
        if report.load.role is not self.role:
            raise WatchError(
                f"{self.address} is a {report.load.role} worker, configured as {self.role}; "
                "correct --prefill-workers and --decode-workers"
            )
        if report.model_id and report.model_id != self._model_id:
            raise WatchError(
                f"{self.address} serves {report.model_id!r}, this router {self._model_id!r}; "
                "start both with the same model directory"
            )
        old = self._report
        if old is not None and old.load.worker_epoch != report.load.worker_epoch:
            self.ledgers.clear()
        self._report = report
        self.live = True
        self._last_words = ""
        self.reports += 1
        self.ledgers.reported()
        self._on_change()
