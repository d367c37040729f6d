"""The Watch streams of routers: the engine's load reports up, the known prefill workers down.

A router that reads slowly gets the latest report, not all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable

from tasuki.clock import Clock, monotonic
from tasuki.errors import EngineDiedError
from tasuki.messages import KnownPrefillWorkers, LoadReport, Role, ToEngine
from tasuki.server.prefill_roster import PrefillRoster
from tasuki.server.worker_state import WorkerState
from tasuki.v1 import worker_pb2
from tasuki.wire.watch import report_to_proto, watch_request_from_proto

STALE_SECONDS = 1.5  # an engine reports once a second at least
EXPIRY_SECONDS = 1.0  # between looks for prefill workers that nobody names any more


class WatchStreams:
    """`tick` now and then; `wake` when the worker's own state changed, its end included."""

    def __init__(
        self,
        state: WorkerState,
        send: Callable[[ToEngine], None],
        clock: Clock = monotonic,
        roster: PrefillRoster | None = None,
    ) -> None:
        self._state = state
        self._send = send
        self._clock = clock
        self._roster = roster or PrefillRoster()
        self._latest: LoadReport | None = None
        self._latest_at = clock()
        self._changed = asyncio.Event()
        self._streams = 0

    def __len__(self) -> int:
        return self._streams

    def report(self, load: LoadReport) -> None:
        """A new load report for every router."""
        self._latest, self._latest_at = load, self._clock()
        self.wake()

    def begin_epoch(self) -> None:
        """There is a new engine: it knows nothing yet, and its first report is to come."""
        self._latest = None
        if self._state.role is Role.DECODE:
            self._tell_engine()

    def wake(self) -> None:
        """Say the state of this worker again: it changed."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def tick(self) -> None:
        """Drop prefill workers that no router names any more."""
        if self._roster.expire(self._clock()):
            self._tell_engine()

    async def serve(
        self,
        requests: AsyncIterable[worker_pb2.WatchRequest],
        write: Callable[[worker_pb2.LoadReport], Awaitable[None]],
    ) -> None:
        """Serve one router until it ends the stream or goes away (then cancelled), or the engine
        dies. Raises the error that the status should show.
        """
        self._state.require_engine()
        self._streams += 1
        reader = asyncio.create_task(self._read(requests))
        writer = asyncio.create_task(self._write(write))
        try:
            done, _ = await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._streams -= 1
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def _read(self, requests: AsyncIterable[worker_pb2.WatchRequest]) -> None:
        async for request in requests:
            targets = watch_request_from_proto(request)
            if self._state.role is Role.DECODE and self._roster.name(targets, self._clock()):
                self._tell_engine()

    async def _write(self, write: Callable[[worker_pb2.LoadReport], Awaitable[None]]) -> None:
        engine = self._state.require_engine()
        while True:
            changed = self._changed
            if self._state.require_engine() is not engine:  # or raises: either ends the stream
                raise EngineDiedError("the engine died, and another has taken its place")
            # an old one says nothing of the engine of now, which may be stopped
            fresh = self._clock() - self._latest_at < STALE_SECONDS
            if self._latest is not None and fresh:
                await write(report_to_proto(self._state.report(self._latest)))
            await changed.wait()

    def _tell_engine(self) -> None:
        self._send(KnownPrefillWorkers(workers=self._roster.workers))
