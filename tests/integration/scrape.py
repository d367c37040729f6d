"""Reads the metrics of a live process into numbers, and waits until they say something."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "tasuki_"
BUSY = ("running_requests", "waiting_requests")
STATES = ("free", "cached", "in_use", "reserved", "quarantined")


class Metrics:
    """One scrape: samples by name (without the prefix) and labels."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removeprefix(PREFIX)
                self._samples.setdefault(name, []).append((dict(sample.labels), sample.value))

    def names(self) -> set[str]:
        return set(self._samples)

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of `name` that have these labels. A name must exist."""
        return sum(
            value
            for have, value in self._samples[name]
            if all(have.get(key) == wanted for key, wanted in labels.items())
        )

    def blocks(self) -> dict[str, int]:
        return {state: int(self.total("kv_blocks", state=state)) for state in STATES}


async def scrape(address: str) -> Metrics:
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
            await writer.wait_closed()
    assert b" 200 " in head.splitlines()[0], head
    return Metrics(body.decode())


async def scrape_until(
    address: str, wanted: Callable[[Metrics], bool], what: str, seconds: float = 15.0
) -> Metrics:
    """Scrape again and again until `wanted`; fail with `what` after a deadline."""
    until = time.monotonic() + seconds
    while True:
        metrics = await scrape(address)
        if wanted(metrics):
            return metrics
        assert time.monotonic() < until, f"{address} never showed {what}"
        await asyncio.sleep(0)


async def assert_no_leaks(address: str) -> None:
    """Wait until a worker is idle, and require that every block is home."""

    def home(metrics: Metrics) -> bool:
        blocks = metrics.blocks()
        held = blocks["in_use"] + blocks["reserved"] + blocks["quarantined"]
        return not (held or any(metrics.total(name) for name in BUSY))

    metrics = await scrape_until(address, home, "all blocks at home and nothing to do")
    assert metrics.total("kv_block_leaks_total") == 0
