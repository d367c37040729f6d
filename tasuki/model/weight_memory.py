"""Where packed weights lie: one after the other, in huge pages, so that a step reads them at the
speed of memory. Knows nothing about what they are.
"""

from __future__ import annotations

import torch

from tasuki.kv.cache import huge_zeros

REGION_BYTES = 64 << 20
ALIGNMENT = 64  # one line of the processor's cache


class WeightMemory:
    """Grows by regions. What was taken stays until the last tensor on a region is gone."""

    def __init__(self) -> None:
        self._region = torch.empty(0, dtype=torch.uint8)

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """[count] elements of `dtype`, zero."""
        nbytes = count * dtype.itemsize
        if nbytes > self._region.numel():
            # nothing of a region is resident before it is written
            self._region = huge_zeros(max(nbytes, REGION_BYTES))
        mine = self._region[:nbytes].view(dtype)
        self._region = self._region[-(-nbytes // ALIGNMENT) * ALIGNMENT :]
        return mine
