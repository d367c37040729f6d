"""How sure a paired ratio is: a Student-t interval of the logarithms. Pure arithmetic."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
STRIPS = 2000  # of Simpson's rule: far more digits than are shown
HALVINGS = 60


@dataclass(frozen=True)
class Cost:
    """What is lost, in percent of what there would be without it; below zero: a gain.

    `low` and `high` are the ends of a 95% interval; infinite with fewer than two pairs.
    """

    low: float
    mean: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Cost:
        """From with over without, one ratio per pair."""
        logs = [math.log(ratio) for ratio in ratios]
        mean = statistics.fmean(logs)
        if len(logs) < 2:
            return cls(-math.inf, _percent(mean), math.inf)
        error = statistics.stdev(logs) / math.sqrt(len(logs))
        half = student_t(0.5 + CONFIDENCE / 2, len(logs) - 1) * error
        return cls(_percent(mean + half), _percent(mean), _percent(mean - half))


def student_t(probability: float, degrees: int) -> float:
    """The quantile of Student's distribution, for a probability from a half on."""
    low, high = 0.0, 1.0
    while _between(high, degrees) < probability - 0.5:
        low, high = high, high * 2
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _between(middle, degrees) < probability - 0.5:
            low = middle
        else:
            high = middle
    return high


def _between(t: float, degrees: int) -> float:
    """The probability from 0 to `t`: Simpson's rule over the angle, where the density is tame.

    With x = sqrt(degrees) * tan(angle) it is cos(angle) ** (degrees - 1), times a constant.
    """
    angle = math.atan(t / math.sqrt(degrees))
    step = angle / STRIPS
    weights = (1 if i in (0, STRIPS) else 4 if i % 2 else 2 for i in range(STRIPS + 1))
    total = sum(w * math.cos(i * step) ** (degrees - 1) for i, w in enumerate(weights))
    logs = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
    return math.exp(logs) / math.sqrt(math.pi) * total * step / 3


def _percent(log_ratio: float) -> float:
    return 100 * (1 - math.exp(log_ratio))
