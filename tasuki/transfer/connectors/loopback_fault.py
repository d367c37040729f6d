"""What may go wrong with a segment on a loopback channel, decided by a policy that tests inject."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Protocol


class Verdict(StrEnum):
    DELIVER = "deliver"
    DROP = "drop"  # the sender believes it was sent; the receiver never gets it
    FLIP = "flip"  # one byte arrives damaged
    HOLD = "hold"  # asked again after the policy's wake


class Fault(Protocol):
    """Asked once per segment (and again after HOLD), by the delivering thread, under its lock."""

    def verdict(self, index: int) -> Verdict:
        """What to do with segment number `index` of its direction, from 0."""

    def attach(self, wake: Callable[[], None]) -> None:
        """`wake` makes a channel ask again; called when a verdict may have changed."""


class NoFault:
    """Deliver everything."""

    def verdict(self, index: int) -> Verdict:
        return Verdict.DELIVER

    def attach(self, wake: Callable[[], None]) -> None:
        pass


class PlannedFault:
    """A fixed plan by segment number; held segments go on their way with `release`."""

    def __init__(self, plan: Mapping[int, Verdict]) -> None:
        self._plan = dict(plan)
        self._lock = threading.Lock()
        self._wakes: list[Callable[[], None]] = []

    def verdict(self, index: int) -> Verdict:
        with self._lock:
            return self._plan.get(index, Verdict.DELIVER)

    def attach(self, wake: Callable[[], None]) -> None:
        with self._lock:
            self._wakes.append(wake)

    def release(self, index: int) -> None:
        """Deliver segment `index` after all. Not called from within a completion."""
        with self._lock:
            self._plan.pop(index, None)
            wakes = list(self._wakes)
        for wake in wakes:
            wake()
