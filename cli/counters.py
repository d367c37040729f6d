"""Counters of a cluster's processes, summed over their lives: a process that starts again begins
at zero, and what it had counted before must not be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "tasuki_"
SCRAPE_SECONDS = 2.0
Sample = tuple[str, tuple[tuple[str, str], ...]]  # name without the prefix, labels


async def scrape(address: str) -> dict[Sample, float]:
    """The metrics page at host:port. Raises OSError or TimeoutError when there is none."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(SCRAPE_SECONDS):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
            _, _, body = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    return {
        (sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


class Counters:
    """Feed it every page that was read, by process; between two pages nothing may be missed but the
    last moments of a process that was killed.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, Sample], float] = {}
        self._sums: defaultdict[str, float] = defaultdict(float)

    def take(self, process: str, page: dict[Sample, float]) -> None:
        for sample, value in page.items():
            if sample[0].endswith("_total"):
                last = self._last.get((process, sample), 0.0)
                self._sums[sample[0]] += value - last if value >= last else value
                self._last[process, sample] = value

    def total(self, name: str) -> int:
        return int(self._sums[name])


def gauge(page: dict[Sample, float], name: str, **labels: str) -> float:
    """The sum of a gauge over all samples that have these labels."""
    return sum(
        value
        for (have, pairs), value in page.items()
        if have == name and labels.items() <= dict(pairs).items()
    )


def blocks_held(page: dict[Sample, float], states: Iterable[str]) -> int:
    return int(sum(gauge(page, "kv_blocks", state=state) for state in states))
