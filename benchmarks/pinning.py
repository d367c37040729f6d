"""Which core a benchmark's process runs on. Threads started later stay on their starter's core."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def own_cores() -> tuple[int, int]:
    """The first and the last core this process may use; the same one twice where it has but one."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[0], cores[-1]


@contextmanager
def pinned(*cores: int) -> Iterator[None]:
    """Keep the calling thread, and the threads it starts, on these cores during the block."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
