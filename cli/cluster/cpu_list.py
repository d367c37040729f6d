"""Which worker gets which of the cores there are to hand out."""

from __future__ import annotations

from collections.abc import Sequence


def share(cpus: Sequence[int], worker: int, threads: int) -> tuple[int, ...]:
    """The cores of one worker: `threads` of them, dealt round robin, each at most once."""
    dealt = (cpus[(worker * threads + index) % len(cpus)] for index in range(threads) if cpus)
    return tuple(dict.fromkeys(dealt))
