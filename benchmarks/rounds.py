"""Interleaved rounds and what they amount to. Pure arithmetic, and one loop that runs callables.

Contenders take turns within each round, so that a machine that slows down slows all of them; ratios
are taken per round, and the median of those is what counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Minimum, median and maximum of what was measured."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(min(values), statistics.median(values), max(values))


def interleave(
    contenders: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Run each contender once per round, every other round in reverse; returns their results."""
    results: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(-warm_up, rounds):
        order = list(contenders)
        for name in order if number % 2 == 0 else reversed(order):
            value = contenders[name]()
            if number >= 0:
                results[name].append(value)
    return results


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Round by round."""
    return [top / bottom for top, bottom in zip(numerators, denominators, strict=True)]


def share_out(rounds: int, turns: int) -> list[int]:
    """Spread `rounds` over at most `turns` turns, none of them empty, as evenly as it goes."""
    turns = min(rounds, turns)
    return [rounds // turns + (number < rounds % turns) for number in range(turns)]
