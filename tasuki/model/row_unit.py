"""Finds out, by trying, how many rows a product of attention tiles needs to be independent of their
number.

Matrix libraries take other kernels, which sum in another order, for very few rows: how few depends
on the library and the processor (here MKL: up to three).
"""

from __future__ import annotations

import torch

from tasuki.model.config import KEY_TILE

UNITS = (4, 8, 16, 32)
ROWS = 192
BATCHES = 2


def probe(head_dim: int) -> int | None:
    """The smallest unit such that products of a multiple of it give every row the same bits.

    None when all units fail: then results depend on the batch in their last bits.
    """
    generator = torch.Generator().manual_seed(2)
    scores = torch.randn(BATCHES, ROWS, head_dim, generator=generator)
    keys = torch.randn(BATCHES, KEY_TILE, head_dim, generator=generator).transpose(1, 2)
    weights = torch.randn(BATCHES, ROWS, KEY_TILE, generator=generator)
    values = torch.randn(BATCHES, KEY_TILE, head_dim, generator=generator)
    products = ((scores, keys), (weights, values))
    for unit in UNITS:
        if all(_independent(left, right, unit) for left, right in products):
            return unit
    return None


def _independent(left: torch.Tensor, right: torch.Tensor, unit: int) -> bool:
    whole = torch.bmm(left, right)
    for batches in range(1, BATCHES + 1):
        for rows in (unit, 2 * unit, 3 * unit, 4 * unit):
            for first in (0, unit, ROWS - rows):
                mine = (slice(batches), slice(first, first + rows))
                if not torch.equal(torch.bmm(left[mine], right[:batches]), whole[mine]):
                    return False
    return True
