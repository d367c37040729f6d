"""Sums of tiles as a binary tree over absolute tile numbers: the one order in which attention adds.

Tile 2i is added to tile 2i + 1, then pairs of pairs, and so on. Where tiles are missing at the end,
zeros stand in, and adding a zero changes nothing: so a row's sum does not depend on how many tiles
others have.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def fold(parts: torch.Tensor) -> torch.Tensor:
    """Add [S, P, n] over P, which is a power of two -> [S, n]."""
    while parts.shape[1] > 1:
        parts = parts[:, 0::2] + parts[:, 1::2]
    return parts[:, 0]


def add_in_order(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """The same tree over tensors that come one after the other, of which few are held at a time.

    As in a binary counter: a partial sum waits until its neighbour of the same size is there.
    """
    waiting: list[torch.Tensor] = []
    for number, part in enumerate(parts):
        total, carry = part, number
        while carry & 1:
            total = waiting.pop().add_(total)
            carry >>= 1
        waiting.append(total)
    total = waiting.pop()
    while waiting:
        total = waiting.pop().add_(total)
    return total
