"""The engine on a thread of this process: EngineClient for tests and embedding.

It says and hears the same messages as the process form, through the same loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

from tasuki.config import WorkerConfig
from tasuki.engine.process_client import error_from_start
from tasuki.engine.start import CoreFactory, serve
from tasuki.engine.transport import QueueTransport
from tasuki.errors import EngineDiedError
from tasuki.messages import EngineFailed, EngineReady, FromEngine, Shutdown, ToEngine

STOP_SECONDS = 10.0


class InlineEngineClient:
    def __init__(
        self, config: WorkerConfig, make_core: CoreFactory, *, allocate_whole_prompt: bool
    ) -> None:
        self._config = config
        self._make_core = make_core
        self._allocate_whole_prompt = allocate_whole_prompt
        self._queue: asyncio.Queue[FromEngine | None] = asyncio.Queue()
        self._transport: QueueTransport | None = None
        self._thread: threading.Thread | None = None

    async def start(self) -> EngineReady:
        loop = asyncio.get_running_loop()

        def deliver(message: FromEngine | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._queue.put_nowait, message)

        transport = self._transport = QueueTransport(deliver)

        def run() -> None:
            try:
                serve(
                    self._config, self._make_core, transport,
                    allocate_whole_prompt=self._allocate_whole_prompt,
                )  # fmt: skip
            finally:
                deliver(None)

        self._thread = threading.Thread(target=run, name="tasuki-engine", daemon=True)
        self._thread.start()
        first = await self._queue.get()
        if isinstance(first, EngineFailed):
            raise error_from_start(first)
        if not isinstance(first, EngineReady):
            raise EngineDiedError("the engine thread ended before it was ready")
        return first

    def send(self, message: ToEngine) -> None:
        if self._transport is not None:
            self._transport.put(message)

    async def receive(self) -> AsyncIterator[FromEngine]:
        while (message := await self._queue.get()) is not None:
            yield message

    async def close(self) -> None:
        if self._transport is None or self._thread is None:
            return
        self._transport.put(Shutdown())
        self._transport.end()
        await asyncio.to_thread(self._thread.join, STOP_SECONDS)
        assert not self._thread.is_alive(), "the engine thread did not end"
