"""What one handoff took, said in the same words for both sides. Pure arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class HandedOver:
    """Times in seconds, as the client or the receiving side saw them."""

    nbytes: int
    transfer: float  # from its start until everything had arrived, by the receiver's own clock
    exposed: float  # prefill's answer until decode's first token of its own, less a decode step
    step: float  # the median step of this request's decode
    token_ids: tuple[int, ...]

    @property
    def speed(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.transfer


def handed_over(
    nbytes: int, transfer: float, answered: float, tokens: Sequence[tuple[float, int]]
) -> HandedOver:
    """`answered` is when prefill's answer came; `tokens` are decode's own, with their times.

    The first of them takes a decode step beside what it waited for the KV.
    """
    times = [time for time, _ in tokens]
    step = statistics.median(b - a for a, b in pairwise(times))
    return HandedOver(
        nbytes, transfer, times[0] - answered - step, step, tuple(token for _, token in tokens)
    )
