"""A second real process for a benchmark: on a core of its own, and gone when the block ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

GOODBYE = 5.0  # seconds to end by itself once its connection has ended


@contextmanager
def child(module: str, argument: str, *, core: int, fds: tuple[int, ...] = ()) -> Iterator[None]:
    """Run `python -m module argument core`; the module pins itself. End its connection first."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, argument, str(core)], pass_fds=fds, stdin=subprocess.DEVNULL
    )
    try:
        yield
        with suppress(subprocess.TimeoutExpired):
            process.wait(GOODBYE)
    finally:
        process.kill()
        process.wait()
