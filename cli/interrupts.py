"""What Ctrl-C, SIGTERM and a closed terminal do: the first stops in order, the next at once."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from cli.say import say
from tasuki.errors import ConfigError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130
PR_SET_PDEATHSIG = 1


async def run_interruptible(work: Coroutine[Any, Any, None], kill: Callable[[], None]) -> int:
    """Await `work`; cancel it on the first signal, and call `kill` on each later one.

    Returns 0 when the work ended or stopped in order, 130 when it was cut short. Raises what the
    work raised.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    seen = 0

    def notice() -> None:
        nonlocal seen
        seen += 1
        if seen == 1:
            say("\nStopping. Once more to stop at once.")
            task.cancel()
        else:
            kill()

    # A hangup that is ignored stays so: that is how nohup says that a closed terminal is fine. An
    # ignored SIGINT only says that a script started us in the background; kill -INT still counts.
    hangup_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    handled = [number for number in SIGNALS if number != signal.SIGHUP or not hangup_ignored]
    for number in handled:
        loop.add_signal_handler(number, notice)
    try:
        # Not `await task`: its being cancelled and our being cancelled would look the same.
        await asyncio.wait((task,))
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
    if not task.cancelled():
        task.result()
    return INTERRUPTED if seen > 1 else 0


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM here when process `parent` ends, however it ends. Linux.

    Raises ConfigError when `parent` is not our parent: it may have ended before we could ask.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError(f"--die-with-parent does not work here: {reason}")
    if os.getppid() != parent:
        raise ConfigError(
            f"--die-with-parent is {parent}, but the parent is process {os.getppid()}; "
            "it may have ended already"
        )
