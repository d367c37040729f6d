"""A prefill worker killed before, during and after the transfer costs the client only time."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from pathlib import Path

import pytest
import pytest_asyncio

from cli.cluster_spec import ClusterSpec
from cli.local_cluster import LocalCluster
from tasuki.client import Client
from tasuki.config import WorkerConfig
from tasuki.messages import Role
from tests.integration.scrape import Metrics, assert_no_leaks, scrape_until
from tests.integration.streams import DEATHS, ask, prompt

pytestmark = [pytest.mark.dist, pytest.mark.asyncio(loop_scope="session")]

PROMPT = prompt(1500, seed=9)
WORKER = WorkerConfig(max_num_batched_tokens=256, handoff_timeout=30.0)
SLOW = {"prefill-0": {"max_num_batched_tokens": 1}}  # a step for each token of the prompt


def spec(model: Path, **worker: float) -> ClusterSpec:
    settings = dataclasses.replace(WORKER, **worker)  # type: ignore[arg-type] # a test's own keys
    return ClusterSpec(model=model, worker=settings, overrides=SLOW)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def expected(colocated_cluster: LocalCluster) -> list[int]:
    """What an undisturbed cluster without prefill workers says."""
    async with Client(colocated_cluster.router_address) as client:
        return (await ask(client, PROMPT)).token_ids


@pytest.mark.parametrize("moment", ["before", "during", "after"])
async def test_a_killed_prefill_worker_costs_only_time(
    moment: str, tiny_model: Path, expected: list[int]
) -> None:
    async with LocalCluster(spec(tiny_model)) as cluster:
        await cluster.wait_ready()
        (prefill,) = cluster.workers_of(Role.PREFILL)
        (decode,) = cluster.workers_of(Role.DECODE)
        if moment == "before":
            os.kill(prefill.engine_pid, signal.SIGSTOP)  # asked, but it never answers
        async with Client(cluster.router_address) as client:
            call = asyncio.create_task(ask(client, PROMPT))
            if moment == "before":
                await scrape_until(decode.metrics, dispatched, "a dispatched handoff")
            elif moment == "during":
                await scrape_until(decode.metrics, part_received, "a part of the KV")
            else:
                await scrape_until(decode.metrics, committed, "a committed handoff")
            cluster.kill(prefill)
            os.kill(prefill.engine_pid, signal.SIGKILL)
            answer = await asyncio.wait_for(call, 60)
            assert answer.token_ids == expected
            if moment == "after":
                assert answer.placement.kind == "split"
                assert answer.placement.fallback_reason == ""
            else:
                assert answer.placement.fallback_reason in DEATHS
                computed = answer.placement.decode_computed_prompt_tokens
                assert computed == len(PROMPT) if moment == "before" else 0 < computed < len(PROMPT)
            # and the next one is local, with the same tokens
            again = await ask(client, PROMPT)
            assert again.token_ids == expected
            assert again.placement.kind == "local"
        await assert_no_leaks(decode.metrics)


async def test_a_prefill_worker_that_makes_no_progress_is_given_up(
    tiny_model: Path, expected: list[int]
) -> None:
    async with LocalCluster(spec(tiny_model, handoff_timeout=1.0)) as cluster:
        await cluster.wait_ready()
        (prefill,) = cluster.workers_of(Role.PREFILL)
        (decode,) = cluster.workers_of(Role.DECODE)
        async with Client(cluster.router_address) as client:
            call = asyncio.create_task(ask(client, PROMPT))
            await scrape_until(decode.metrics, part_received, "a part of the KV")
            os.kill(prefill.engine_pid, signal.SIGSTOP)
            try:
                answer = await asyncio.wait_for(call, 60)
            finally:
                os.kill(prefill.engine_pid, signal.SIGCONT)
        assert answer.token_ids == expected
        assert answer.placement.fallback_reason == "stalled"
        await assert_no_leaks(decode.metrics)
        await assert_no_leaks(prefill.metrics)


def dispatched(metrics: Metrics) -> bool:
    return metrics.total("handoffs", state="dispatched") == 1


def part_received(metrics: Metrics) -> bool:
    return metrics.total("kv_received_bytes_total") > 0


def committed(metrics: Metrics) -> bool:
    return metrics.total("kv_transfer_bytes_count") == 1
