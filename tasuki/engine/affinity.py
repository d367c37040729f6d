"""Which cores a process may use. Torch-free."""

from __future__ import annotations

import os

from tasuki.errors import ConfigError


def parse_cpus(text: str) -> set[int]:
    """`0,2-3` -> {0, 2, 3}. Raises ConfigError naming the part that is wrong."""
    cpus: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, _, last = part.partition("-")
        try:
            cpus.update(range(int(first), int(last or first) + 1))
        except ValueError:
            raise ConfigError(f"--cpus has {part!r}; expected cores such as 0 or 0,2-3") from None
    return cpus


def pin(text: str) -> None:
    """Pin this process, and what it starts from now on, to the cores of `text`; empty: leave it."""
    cpus = parse_cpus(text)
    if not cpus:
        return
    allowed = os.sched_getaffinity(0)
    if not cpus <= allowed:
        raise ConfigError(
            f"--cpus asks for cores {sorted(cpus - allowed)}; this machine offers {sorted(allowed)}"
        )
    os.sched_setaffinity(0, cpus)
