"""One worker's server process from start to exit code. Torch-free: its caller makes the engine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os

from tasuki.config import WorkerConfig
from tasuki.errors import ConfigError, ModelError, TasukiError
from tasuki.messages import Role
from tasuki.server.lifecycle import (
    Lifecycle,
    ReadyLine,
    StopCause,
    configure_logging,
    log_effective,
    write_ready_line,
)
from tasuki.server.worker_server import EngineFactory, WorkerServer

DEATH_GRACE = 0.5  # seconds between the engine's end and ours, so that everybody hears of it
EXIT_FAILURE, EXIT_USAGE = 1, 2
log = logging.getLogger(__name__)


async def serve_worker(role: Role, config: WorkerConfig, make_engine: EngineFactory) -> int:
    """Serve until told to stop; returns the process's exit code.

    0: drained or told to stop; 1: the engine ended or could not start; 2: a setting, the model
    directory or a port cannot be used. Run it on the main thread: it takes the signals.
    """
    configure_logging(role.value)
    with Lifecycle(lifeline_fd=config.lifeline_fd) as lifecycle:
        try:
            server = WorkerServer(role, config, make_engine)
        except TasukiError as error:
            return _refuse(error)
        log_effective(server.state.config)
        try:
            cause = await _start(server, lifecycle)
            if cause is None:
                cause = await _serve(server, lifecycle, config.ready_fd)
            if cause is StopCause.DRAIN:
                await server.drain(config.drain_timeout)
            elif cause is StopCause.FAILURE:
                await asyncio.sleep(DEATH_GRACE)
        except TasukiError as error:
            return _refuse(error)
        finally:
            await server.close()
    log.info("stopped")
    return EXIT_FAILURE if cause is StopCause.FAILURE else 0


def _refuse(error: TasukiError) -> int:
    log.error("cannot start: %s", error.message)
    return EXIT_USAGE if isinstance(error, ConfigError | ModelError) else EXIT_FAILURE


async def _start(server: WorkerServer, lifecycle: Lifecycle) -> StopCause | None:
    """Start, unless told to stop first; returns the cause of that, else None."""
    starting = asyncio.create_task(server.start())
    stopped = asyncio.create_task(lifecycle.wait_stop())
    try:
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            return stopped.result()
        starting.result()
        return None
    finally:
        for task in (starting, stopped):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, TasukiError):
                await task


async def _serve(server: WorkerServer, lifecycle: Lifecycle, ready_fd: int) -> StopCause:
    """Say that we are ready, and wait for a reason to stop."""
    state = server.state
    assert state.engine is not None
    line = ReadyLine(
        role=state.role.value,
        worker_id=state.worker_id,
        address=state.address,
        metrics=server.page.address,
        pid=os.getpid(),
        engine_pid=state.engine.engine_pid,
    )
    log.info("ready %s", line.encode().decode().strip())
    write_ready_line(ready_fd, line)
    gc.collect()
    gc.freeze()  # a full collection of what never dies would pause every stream
    ended = asyncio.create_task(server.ended.wait())
    ended.add_done_callback(lambda task: _on_end(task, lifecycle))
    try:
        return await lifecycle.wait_stop()
    finally:
        ended.cancel()


def _on_end(task: asyncio.Task[bool], lifecycle: Lifecycle) -> None:
    if not task.cancelled():
        lifecycle.request_stop(StopCause.FAILURE)
