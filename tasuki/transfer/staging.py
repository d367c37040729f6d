"""Memory for segments whose blocks do not lie side by side: one preallocated ring per link end.

Knows sizes only. A fresh allocation per segment would cost two thirds of the speed (first touch);
pages of the ring are touched when first used, so an idle link costs no memory.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import torch


class Staging:
    """One buffer; whoever took it releases it exactly once."""

    def __init__(self, view: torch.Tensor, start: int, ring: StagingRing | None) -> None:
        self.view = view
        self.start = start
        self.released = False
        self._ring = ring

    @classmethod
    def fresh(cls, nbytes: int) -> Staging:
        """A buffer of its own, for when the ring is full and waiting is not allowed."""
        return cls(torch.empty(nbytes, dtype=torch.uint8), 0, None)

    def release(self) -> None:
        assert not self.released, "a staging buffer was released twice"
        self.released = True
        if self._ring is not None:
            self._ring.reclaim()


class StagingRing:
    """Buffers are taken in order and, since channels are FIFO, come back about in order."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a ring of {capacity} bytes")
        self.capacity = capacity
        self._memory = torch.empty(capacity, dtype=torch.uint8)
        self._taken: deque[Staging] = deque()
        self._head = 0

    @property
    def in_use(self) -> int:
        """Buffers taken and not released."""
        return sum(not staging.released for staging in self._taken)

    def take(self, nbytes: int) -> Staging | None:
        """A buffer of `nbytes`, uint8 [nbytes]; None when there is no room now."""
        assert nbytes > 0
        start = self._find(nbytes)
        if start is None:
            return None
        self._head = start + nbytes
        staging = Staging(self._memory[start : self._head], start, self)
        self._taken.append(staging)
        return staging

    def reclaim(self) -> None:
        """Make room of the oldest buffers that were released."""
        while self._taken and self._taken[0].released:
            self._taken.popleft()

    def check_integrity(self) -> None:
        spans = sorted((s.start, s.start + s.view.numel()) for s in self._taken)
        assert all(end <= self.capacity for _, end in spans)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))

    def _find(self, nbytes: int) -> int | None:
        if not self._taken:
            return 0 if nbytes <= self.capacity else None
        tail = self._taken[0].start
        if self._head <= tail:  # wrapped: the free part lies between head and tail
            return self._head if self._head + nbytes <= tail else None
        if self._head + nbytes <= self.capacity:
            return self._head
        return 0 if nbytes <= tail else None
