"""Memory for segments that do not move to or from the KV cache itself: one preallocated ring per
link end. They are those whose blocks do not lie side by side, and all of them where the channel
moves host memory and the cache is a GPU's: then the ring is pinned, so that the GPU can copy.

Knows sizes and devices only. A fresh allocation per segment would cost two thirds of the speed
(first touch); pages of an unpinned ring are touched when first used, so an idle link costs none.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class SegmentMemory:
    """What a channel can move, and where the KV is."""

    channel: str = "cpu"
    cache: torch.device = CPU

    @property
    def in_place(self) -> bool:
        """Whether the channel can move blocks of the cache itself."""
        return torch.device(self.channel) == self.cache

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory that the channel can move, and the cache's device copy: uint8 [nbytes]."""
        pinned = self.channel == "cpu" and self.cache.type == "cuda"
        return torch.empty(nbytes, dtype=torch.uint8, device=self.channel, pin_memory=pinned)


class Staging:
    """One buffer; whoever took it releases it exactly once."""

    def __init__(self, view: torch.Tensor, start: int, ring: StagingRing | None) -> None:
        self.view = view
        self.start = start
        self.released = False
        self._ring = ring

    @classmethod
    def fresh(cls, nbytes: int, device: str = "cpu") -> Staging:
        """A buffer of its own, for when the ring is full and waiting is not allowed. Never pinned:
        pinning takes longer than the slower copy.
        """
        return cls(torch.empty(nbytes, dtype=torch.uint8, device=device), 0, None)

    def release(self) -> None:
        assert not self.released, "a staging buffer was released twice"
        self.released = True
        if self._ring is not None:
            self._ring.reclaim()


class StagingRing:
    """Buffers are taken in order and, since channels are FIFO, come back about in order."""

    def __init__(self, capacity: int, memory: SegmentMemory | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"a ring of {capacity} bytes")
        self.capacity = capacity
        self._memory = (memory or SegmentMemory()).allocate(capacity)
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
