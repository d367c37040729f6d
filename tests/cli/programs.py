"""How tests start stand-ins instead of the real processes, and wait for processes to go."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

STANDIN = Path(__file__).with_name("standin.py")
GONE_WITHIN = 10.0


def standin(
    habits: Mapping[str, list[str]] | None = None,
) -> Callable[[str], list[str]]:
    """A `ClusterSpec.program` that starts stand-ins; `habits` by role."""

    def program(role: str) -> list[str]:
        # -S and -E: it needs no installed package, and starts in a fraction of the time.
        return [sys.executable, "-S", "-E", str(STANDIN), role, *(habits or {}).get(role, [])]

    return program


async def nothing_missing(router_address: str, prefill: int, decode: int) -> str:
    """A probe of a cluster that is always ready."""
    return ""


def running(pids: list[int]) -> list[int]:
    """Those of `pids` that still run; a zombie has ended."""
    found = []
    for pid in pids:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        if stat.rpartition(")")[2].split()[0] not in "ZX":
            found.append(pid)
    return found


def recorded(path: Path) -> list[int]:
    """The process ids that stand-ins wrote to their file."""
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def wait_until(condition: Callable[[], object], what: str, seconds: float = GONE_WITHIN) -> float:
    """Wait for a condition with a deadline; returns how long it took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.01)
    return time.monotonic() - begun
