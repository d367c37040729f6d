"""All three processes are scraped after a mixed run, and their numbers must agree."""

from __future__ import annotations

import pytest

from cli.cluster.local_cluster import LocalCluster
from tasuki.client import Client
from tasuki.errors import InvalidRequestError
from tasuki.messages import Role
from tests.integration.scrape import Metrics, assert_no_leaks, scrape, scrape_until
from tests.integration.streams import ask, prompt

pytestmark = [pytest.mark.dist, pytest.mark.asyncio(loop_scope="session")]

LENGTHS = (8, 40, 64, 100, 250, 333)
SPLIT = [length for length in LENGTHS if length >= 64]
PARTS = ("queue", "reservation", "prefill_queue", "prefill_compute", "fallback", "hop")

EVERY_FAMILY = {
    "router": {
        "requests_total", "slo_requests_total", "rejections_total", "ttft_seconds_sum",
        "tpot_seconds_sum", "inter_token_latency_seconds_sum", "e2e_seconds_sum",
        "queue_seconds_sum", "ttft_part_seconds_sum", "placements_total", "workers",
        "admission_queue_requests", "oldest_waiting_seconds", "fallbacks_total", "build_info",
    },
    "prefill": {
        "prefill_tokens_total", "kv_sent_bytes_total", "kv_blocks", "kv_block_leaks_total",
        "running_requests", "waiting_requests", "preemptions_total", "step_seconds_sum", "links",
        "build_info", "oldest_waiting_seconds", "prefill_queue_tokens",
    },
    "decode": {
        "kv_received_bytes_total", "kv_transfer_seconds_sum", "kv_transfer_exposed_seconds_sum",
        "kv_transfer_bytes_sum", "kv_transfer_failures_total", "stale_results_dropped_total",
        "handoffs", "fallbacks_total", "kv_blocks", "kv_block_leaks_total", "running_requests",
        "waiting_requests", "oldest_waiting_seconds", "preemptions_total", "step_seconds_sum",
        "links", "build_info",
    },
}  # fmt: skip


class Growth:
    """How much a metric grew between two scrapes."""

    def __init__(self, before: Metrics, after: Metrics) -> None:
        self._before, self._after = before, after

    def __call__(self, name: str, **labels: str) -> float:
        return self._after.total(name, **labels) - self._before.total(name, **labels)


async def test_three_processes_tell_one_story(split: LocalCluster) -> None:
    (decode,), (prefill,) = split.workers_of(Role.DECODE), split.workers_of(Role.PREFILL)
    processes = {"router": split.router, "prefill": prefill, "decode": decode}
    for worker in (decode, prefill):
        await assert_no_leaks(worker.metrics)
    before = {role: await scrape(process.metrics) for role, process in processes.items()}
    async with Client(decode.address) as direct:
        block_bytes = int((await direct.server_info()).facts["block_bytes"])

    async with Client(split.router_address) as client:
        # one after another: beside each other, some would rightly be computed where they decode
        answers = [await ask(client, prompt(n), max_tokens=9) for n in LENGTHS]
        with pytest.raises(InvalidRequestError):
            await ask(client, [10**6])
    blocks = sum(-(-n // 16) for n in SPLIT)
    total = blocks * block_bytes
    await scrape_until(
        prefill.metrics,
        lambda m: Growth(before["prefill"], m)("kv_sent_bytes_total") == total,
        f"{total} bytes sent",
    )
    await scrape_until(
        decode.metrics,
        lambda m: Growth(before["decode"], m)("kv_transfer_bytes_count") == len(SPLIT),
        f"{len(SPLIT)} handoffs",
    )
    after = {role: await scrape(process.metrics) for role, process in processes.items()}
    for role, families in EVERY_FAMILY.items():
        assert families <= after[role].names(), families - after[role].names()

    router = Growth(before["router"], after["router"])
    assert router("requests_total", outcome="completed") == len(LENGTHS)
    assert router("requests_total", outcome="rejected") == 1
    assert router("requests_total") == len(LENGTHS) + 1
    assert router("slo_requests_total", setup="split") == len(LENGTHS) + 1
    assert router("rejections_total", reason="invalid") == 1
    assert router("placements_total", kind="split") == len(SPLIT)
    assert router("placements_total", reason="short_prompt") == len(LENGTHS) - len(SPLIT)
    assert router("ttft_seconds_count") == len(LENGTHS)
    assert router("inter_token_latency_seconds_count") == len(LENGTHS) * 8
    parts = sum(router("ttft_part_seconds_sum", part=part) for part in PARTS)
    assert parts == pytest.approx(router("ttft_seconds_sum"), abs=1e-6)
    assert router("negative_hop_total") == 0

    decoded = Growth(before["decode"], after["decode"])
    assert decoded("kv_received_bytes_total") == total
    assert decoded("kv_transfer_bytes_sum") == total
    assert decoded("kv_transfer_seconds_count") == len(SPLIT)
    assert decoded("kv_transfer_failures_total") == decoded("fallbacks_total") == 0
    assert Growth(before["prefill"], after["prefill"])("prefill_tokens_total") == sum(SPLIT)
    for worker in (prefill, decode):
        metrics = after[worker.role]
        async with Client(worker.address) as direct:
            num_blocks = int((await direct.server_info()).facts["num_blocks"])
        assert sum(metrics.blocks().values()) == num_blocks
        assert metrics.total("links", state="open") == 1
        assert metrics.total("build_info") == 1
    for answer in answers:
        timings = answer.timings
        summed = sum(getattr(timings, part) for part in PARTS)
        assert summed == pytest.approx(timings.ttft, abs=1e-9)
        assert timings.hop >= 0
