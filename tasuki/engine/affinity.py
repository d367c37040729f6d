"""Which cores a process may use, and the `--cpus` notation. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tasuki.errors import ConfigError


def parse_cpus(text: str) -> tuple[int, ...]:
    """Turn `0,2-3` into (0, 2, 3), in the order given. Empty text: no cores, that is, no pinning.

    Raises ConfigError for anything else, for a core named twice, and for one that this process may
    not use.
    """
    cpus: list[int] = []
    for part in (part.strip() for part in text.split(",")) if text.strip() else ():
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"--cpus holds {part!r}; expected a list of cores such as 0,2-3")
        low, high = int(first), int(last or first)
        if high < low or high > 100_000:
            raise ConfigError(
                f"--cpus holds {part!r}; expected a range that counts up, such as 2-3"
            )
        cpus += range(low, high + 1)
    allowed = os.sched_getaffinity(0)
    for cpu in cpus:
        if cpus.count(cpu) > 1:
            raise ConfigError(f"--cpus names core {cpu} twice; expected each core once")
        if cpu not in allowed:
            usable = format_cpus(sorted(allowed))
            raise ConfigError(f"--cpus names core {cpu}; this process may use {usable}")
    return tuple(cpus)


def format_cpus(cpus: Sequence[int]) -> str:
    """The notation that `parse_cpus` reads."""
    return ",".join(str(cpu) for cpu in cpus)


def pin(text: str) -> None:
    """Pin this process, and what it starts from now on, to the cores of `text`; empty: leave it."""
    cpus = parse_cpus(text)
    if cpus:
        os.sched_setaffinity(0, cpus)
