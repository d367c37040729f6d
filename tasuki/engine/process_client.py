"""The engine as a process of its own: the product's form of EngineClient. Torch-free.

The only tie is a socket pair: when this side dies the engine sees the end and exits; when the
engine dies this side sees the end and tells its streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator

from tasuki.config import WorkerConfig, to_args, without_settings
from tasuki.engine.frames import FrameReader, encode_frame, from_engine_decoder
from tasuki.errors import ConfigError, EngineDiedError, ModelError, TasukiError
from tasuki.messages import EngineFailed, EngineReady, FromEngine, Shutdown, ToEngine

READ_BYTES = 1 << 18
START_SECONDS = 300.0
STOP_SECONDS = 10.0


class ProcessEngineClient:
    def __init__(self, module: str, config: WorkerConfig) -> None:
        self._module = module
        self._config = config
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._frames: FrameReader[FromEngine] = FrameReader(from_engine_decoder)
        self._closing = False
        self._backlog: deque[FromEngine] = deque()  # decoded, not yet handed out

    async def start(self) -> EngineReady:
        """Start the process and wait until it is warm. Raises what its start raised."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            config = dataclasses.replace(
                self._config, engine_fd=theirs.fileno(), lifeline_fd=-1, ready_fd=-1
            )
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self._module, *to_args(config),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=without_settings(os.environ, WorkerConfig)
                | {"OMP_NUM_THREADS": str(max(1, config.threads))},
            )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 24)
        try:
            async with asyncio.timeout(START_SECONDS):
                return await self._wait_ready()
        except TimeoutError:
            await self.close()
            raise EngineDiedError(
                f"the engine was not ready after {START_SECONDS:.0f} s; see its log above"
            ) from None
        except BaseException:
            await self.close()
            raise

    async def _wait_ready(self) -> EngineReady:
        async for message in self.receive():  # the first one says how the start went
            if isinstance(message, EngineReady):
                return message
            if isinstance(message, EngineFailed):
                raise error_from_start(message)
        raise EngineDiedError("the engine process ended before it was ready; see its log above")

    def send(self, message: ToEngine) -> None:
        if self._writer is not None and not self._closing:
            self._writer.write(encode_frame(message))

    async def receive(self) -> AsyncIterator[FromEngine]:
        assert self._reader is not None, "start the engine first"
        while True:
            while self._backlog:
                yield self._backlog.popleft()
            try:
                data = await self._reader.read(READ_BYTES)
            except OSError:
                return
            if not data:
                return
            self._backlog.extend(self._frames.feed(data))

    async def close(self) -> None:
        """Ask the engine to shut down, kill it after a deadline, and reap it."""
        if self._process is None:
            return
        self.send(Shutdown())
        self._closing = True
        process, self._process = self._process, None
        try:
            async with asyncio.timeout(STOP_SECONDS):
                if self._writer is not None:
                    self._writer.write_eof()
                await process.wait()
        except (TimeoutError, OSError):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()


def error_from_start(message: EngineFailed) -> TasukiError:
    """Why an engine could not start, as the error its own code raised."""
    kinds: dict[str, type[TasukiError]] = {"config": ConfigError, "model": ModelError}
    kind = kinds.get(message.error.reason, EngineDiedError)
    return kind(message.error.message)
