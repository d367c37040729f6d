"""A decode worker that dies, or stops, is replaced: every stream goes on, token for token."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cli.cluster.cluster_spec import ClusterSpec
from cli.cluster.local_cluster import LocalCluster
from router.config import RouterConfig
from tasuki.client import Client, GenerateOutput
from tasuki.config import WorkerConfig
from tasuki.messages import Role
from tests.integration.scrape import assert_no_leaks, scrape
from tests.integration.streams import ask, prompt

pytestmark = [pytest.mark.dist, pytest.mark.asyncio(loop_scope="session")]

TOKENS = 1500
PROMPTS = [prompt(200, seed=f"death {n}") for n in range(4)]
SAMPLED = {"temperature": 0.9, "presence_penalty": 0.5, "seed": 11, "logprobs": 2}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def expected(colocated_cluster: LocalCluster) -> list[list[int]]:
    """What an undisturbed cluster says: half of it greedily, half sampled."""
    async with Client(colocated_cluster.router_address) as client:
        return [
            (await ask(client, ids, max_tokens=TOKENS, **options(n))).token_ids
            for n, ids in enumerate(PROMPTS)
        ]


def options(number: int) -> dict[str, Any]:
    return SAMPLED if number % 2 else {}


async def collect(stream: AsyncIterator[GenerateOutput], found: list[int]) -> float:
    """The rest of a stream; the longest wait between two outputs, in seconds."""
    longest, last = 0.0, time.monotonic()
    async for output in stream:
        assert output.index == len(found), "nothing twice, nothing missing"
        assert not output.logprobs or len(output.logprobs) == len(output.token_ids)
        found += output.token_ids
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    return longest


async def under_fault(cluster: LocalCluster, fault: str) -> tuple[list[list[int]], float]:
    """All prompts at once, with the fault when each has its first tokens; and the longest stall."""
    victim = cluster.workers_of(Role.DECODE)[0]
    async with Client(cluster.router_address) as client:
        streams = [
            client.generate(
                prompt_token_ids=ids,
                max_tokens=TOKENS,
                ignore_eos=True,
                **options(n),
            )
            for n, ids in enumerate(PROMPTS)
        ]
        firsts = [await anext(stream) for stream in streams]
        found = [list(first.token_ids) for first in firsts]
        if fault == "engine killed":
            os.kill(victim.engine_pid, signal.SIGKILL)
        elif fault == "server killed":
            cluster.kill(victim)
        else:
            os.kill(victim.engine_pid, signal.SIGSTOP)
        try:
            stalls = await asyncio.wait_for(asyncio.gather(*map(collect, streams, found)), 60)
        finally:
            if fault == "stopped":
                os.kill(victim.engine_pid, signal.SIGCONT)
    return found, max(stalls)


@pytest.mark.parametrize("fault", ["engine killed", "server killed", "stopped"])
async def test_streams_go_on_elsewhere(
    tiny_model: Path, expected: list[list[int]], fault: str
) -> None:
    spec = ClusterSpec(
        model=tiny_model, decode=2,
        # a token a step, and steps that take a moment: so that there is an "amid"
        worker=WorkerConfig(max_num_batched_tokens=64),
        router=RouterConfig(decode_workers="127.0.0.1:1", report_timeout=2.0),
    )  # fmt: skip
    async with LocalCluster(spec) as cluster:
        await cluster.wait_ready()
        found, stall = await under_fault(cluster, fault)
        print(f"decode worker {fault}: the longest stall was {stall:.2f} s")
        assert found == expected
        router = await scrape(cluster.router.metrics)
        moved = router.total("migrations_total")
        assert 1 <= moved <= 4
        reason = "stalled" if fault == "stopped" else "decode_died"
        assert router.total("migrations_total", reason=reason) == moved
        assert stall < (10.0 if fault == "stopped" else 5.0)
        if fault != "server killed":
            await cluster.wait_ready()  # it is back, with open links
        for worker in cluster.workers:
            if fault != "server killed" or worker.worker_id != "decode-0":
                await assert_no_leaks(worker.metrics)
