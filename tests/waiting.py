"""Waiting in tests: for a condition, with a deadline; never for time to pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

DEADLINE = 10.0


async def until(condition: Callable[[], object], what: str, seconds: float = DEADLINE) -> None:
    """Return as soon as `condition()` is true; fail the test, saying what was missing, if never."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds} s for: {what}")
        await asyncio.sleep(0.002)
