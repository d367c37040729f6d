"""What counts as good service, and the arithmetic over many requests. Pure: no clock, no I/O.

A request is good iff it completed and met both limits. Every request that arrived is in the
denominator, save those whose own caller cancelled them: these are reported apart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class Slo:
    """Limits in seconds: arrival to first token, and per output token after the first."""

    ttft: float
    tpot: float

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot"):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise ValueError(f"{name} of an SLO is {value}; expected a finite number above 0")


class SloResult(StrEnum):
    MET = "met"
    TTFT_MISS = "ttft_miss"
    TPOT_MISS = "tpot_miss"
    BOTH_MISS = "both_miss"
    REJECTED = "rejected"  # refused before any token
    FAILED = "failed"  # began, or was taken on, and did not complete


def judge(slo: Slo, *, ttft: float, tpot: float | None, completed: bool) -> SloResult:
    """Judge one request that was not rejected; seconds.

    `tpot` is None for a request of one token, which meets that limit vacuously.
    """
    if not completed:
        return SloResult.FAILED
    late = ttft > slo.ttft
    slow = tpot is not None and tpot > slo.tpot
    if late and slow:
        return SloResult.BOTH_MISS
    if late:
        return SloResult.TTFT_MISS
    return SloResult.TPOT_MISS if slow else SloResult.MET


@dataclass(frozen=True)
class SloSummary:
    """Counts over many requests. `cancelled` ones, by their own callers, are not in `arrived`."""

    counts: dict[SloResult, int]
    cancelled: int
    duration: float  # seconds over which the counted requests arrived

    @property
    def arrived(self) -> int:
        return sum(self.counts.values())

    @property
    def good(self) -> int:
        return self.counts[SloResult.MET]

    @property
    def attainment(self) -> float:
        """good / arrived; 0 when nothing arrived, for nothing was shown."""
        return self.good / self.arrived if self.arrived else 0.0

    @property
    def goodput(self) -> float:
        """Good requests per second."""
        return self.good / self.duration if self.duration > 0 else 0.0


def summarize(results: Iterable[SloResult | None], duration: float) -> SloSummary:
    """Count results; None stands for a request that its own caller cancelled."""
    tally = Counter(results)
    counts = {result: tally[result] for result in SloResult}
    return SloSummary(counts=counts, cancelled=tally[None], duration=duration)
