"""How a server process begins and ends: logs, the ready line, signals, the lifeline.

The first SIGTERM or SIGINT asks for a drain, the second exits at once; the end of the lifeline asks
for an immediate stop and, should that not come about, exits as well. Knows nothing about what the
process serves.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from tasuki import config as configuration
from tasuki.server.lifeline import Lifeline

LIFELINE_GRACE = 1.0  # seconds between the end of the lifeline and a forced exit
SIGNALS = (signal.SIGTERM, signal.SIGINT)
FORCED_EXIT = 130
log = logging.getLogger(__name__)


class StopCause(StrEnum):
    DRAIN = "drain"  # finish what runs, then exit 0
    NOW = "now"  # nobody is left to finish it for
    FAILURE = "failure"  # something this process cannot live without ended; exit 1


@dataclass(frozen=True)
class ReadyLine:
    """What a parent learns when a process is ready, as one line of JSON."""

    role: str
    worker_id: str  # empty for a router
    address: str  # host:port of the gRPC server
    metrics: str  # host:port of the metrics page
    pid: int
    engine_pid: int  # 0 for a router

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def write_ready_line(ready_fd: int, line: ReadyLine) -> None:
    """Write to an inherited descriptor and close it, or (-1) to stdout."""
    if ready_fd < 0:
        sys.stdout.write(line.encode().decode())
        sys.stdout.flush()
        return
    with os.fdopen(ready_fd, "wb") as ready:
        ready.write(line.encode())


def configure_logging(name: str, level: int = logging.INFO) -> None:
    """One line per event on stderr, with the process's name."""
    text = f"%(asctime)s %(levelname).1s {name}[{os.getpid()}] %(message)s"
    logging.basicConfig(stream=sys.stderr, level=level, format=text, force=True)


def log_effective(config: Any) -> None:
    """Log the effective configuration, once, on one line."""
    settings = configuration.effective(config)
    log.info("configuration %s", json.dumps(settings))


class Lifecycle:
    """Waits for a reason to stop. Use as a context manager on the main thread's event loop."""

    def __init__(
        self,
        *,
        lifeline_fd: int = -1,
        lifeline_grace: float = LIFELINE_GRACE,
        exit_now: Callable[[int], None] = os._exit,
    ) -> None:
        self._lifeline_fd = lifeline_fd
        self._lifeline_grace = lifeline_grace
        self._exit_now = exit_now
        self._lifeline: Lifeline | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Future[StopCause] | None = None
        self._signals = 0

    def __enter__(self) -> Lifecycle:
        self._loop = loop = asyncio.get_running_loop()
        self._stop = loop.create_future()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        if self._lifeline_fd >= 0:
            self._lifeline = Lifeline(
                self._lifeline_fd,
                self._on_lifeline_end,
                grace=self._lifeline_grace,
                force=lambda: self._exit_now(FORCED_EXIT),
            )
            self._lifeline.start()
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._loop is not None
        for number in SIGNALS:
            self._loop.remove_signal_handler(number)
        if self._lifeline is not None:
            self._lifeline.close()

    def request_stop(self, cause: StopCause) -> None:
        """Make `wait_stop` return; the first cause stands. Call it on the event loop."""
        assert self._stop is not None
        if not self._stop.done():
            self._stop.set_result(cause)

    async def wait_stop(self) -> StopCause:
        """Wait until something asks this process to stop."""
        assert self._stop is not None
        return await asyncio.shield(self._stop)

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        name = signal.Signals(number).name
        if self._signals > 1:
            log.warning("%s again: exiting now", name)
            self._exit_now(FORCED_EXIT)
        log.info("%s: draining; a second one exits now", name)
        self.request_stop(StopCause.DRAIN)

    def _on_lifeline_end(self) -> None:
        log.info("the parent is gone: stopping")
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.request_stop, StopCause.NOW)
