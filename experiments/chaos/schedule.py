"""Which fault strikes when: drawn from a seed, every kind in turn. Pure; knows no processes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    KILL = "kill"  # SIGKILL, and the process is started again
    STOP = "stop"  # SIGSTOP, and SIGCONT a while later
    RESTART = "restart"  # SIGTERM: it drains; and it is started again
    CUT = "cut"  # the data connections of a worker's links end
    SLOW = "slow"  # they let little through for a while
    CORRUPT = "corrupt"  # bytes arrive changed


class Part(StrEnum):
    ENGINE = "engine"
    SERVER = "server"  # the process that clients and other workers talk to, and its engine with it


@dataclass(frozen=True)
class Fault:
    kind: FaultKind
    role: str  # "router", "prefill" or "decode"
    part: Part = Part.SERVER


@dataclass(frozen=True)
class PlannedFault:
    fault: Fault
    at: float  # seconds from the start
    pick: int  # which process of the role: any number, taken modulo how many there are
    seconds: float  # how long it lasts, where it does


EVERY_FAULT = (
    Fault(FaultKind.KILL, "prefill", Part.ENGINE),
    Fault(FaultKind.KILL, "decode", Part.ENGINE),
    Fault(FaultKind.KILL, "prefill"),
    Fault(FaultKind.KILL, "decode"),
    Fault(FaultKind.KILL, "router"),
    Fault(FaultKind.STOP, "prefill", Part.ENGINE),
    Fault(FaultKind.STOP, "decode", Part.ENGINE),
    Fault(FaultKind.RESTART, "prefill"),
    Fault(FaultKind.RESTART, "decode"),
    Fault(FaultKind.RESTART, "router"),
    Fault(FaultKind.CUT, "prefill"),
    Fault(FaultKind.CUT, "decode"),
    Fault(FaultKind.SLOW, "prefill"),  # it is the side that sends
    Fault(FaultKind.CORRUPT, "decode"),  # and that one receives
)


# Those that every process outlives.
MILD_FAULTS = tuple(
    fault
    for fault in EVERY_FAULT
    if fault.kind in (FaultKind.CUT, FaultKind.SLOW, FaultKind.CORRUPT)
)


def plan(
    seed: int,
    faults: Sequence[Fault] = EVERY_FAULT,
    interval: tuple[float, float] = (1.0, 3.0),
) -> Iterator[PlannedFault]:
    """Faults for ever: each round has every one of them once, in an order of its own."""
    rng, at = random.Random(f"chaos {seed}"), 0.0
    while faults:
        for fault in rng.sample(faults, len(faults)):
            at += rng.uniform(*interval)
            yield PlannedFault(fault, at, rng.randrange(1 << 16), rng.uniform(1.0, 6.0))
