"""Whether a series of samples stays flat. Pure statistics; knows no processes.

The first quarter is warm-up and says nothing. A slow growth shows in a slope that single spikes
cannot bend (Theil and Sen: the median of the slopes between all pairs of samples); a count that
goes up and down with the work shows it in its maximum.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import combinations

HOUR = 3600.0  # seconds
LEAST = 8  # samples: two in every quarter

Series = Sequence[tuple[float, float]]
"""(seconds from the start, value), in order of time."""


def growth_per_hour(series: Series) -> float:
    """The slope after the warm-up, projected over an hour, in the value's own unit."""
    settled = _quarters(series, 1, 4)
    slopes = [(b - a) / (t - s) for (s, a), (t, b) in combinations(settled, 2)]
    return statistics.median(slopes) * HOUR


def rise(series: Series) -> float:
    """How far the maximum of the last quarter lies above that of the second."""
    before, after = _quarters(series, 1, 2), _quarters(series, 3, 4)
    return max(value for _, value in after) - max(value for _, value in before)


def _quarters(series: Series, first: int, last: int) -> Series:
    if len(series) < LEAST:
        raise ValueError(f"{len(series)} samples; expected at least {LEAST}")
    count = len(series)
    return series[count * first // 4 : count * last // 4]
