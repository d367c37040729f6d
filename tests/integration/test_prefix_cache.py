"""Prefix caches and operator commands on a live split cluster: real processes, real gloo."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from cli.cluster.cluster_spec import ClusterSpec
from cli.cluster.local_cluster import LocalCluster
from tasuki.client import Client
from tasuki.config import WorkerConfig
from tasuki.messages import Role
from tasuki.v1 import worker_pb2, worker_pb2_grpc
from tests.integration.conftest import come_home
from tests.integration.scrape import scrape_until
from tests.integration.streams import ask, prompt
from tests.leftovers import look

pytestmark = [pytest.mark.dist, pytest.mark.asyncio(loop_scope="session")]

PROMPT = prompt(320, seed=8)  # whole blocks
OTHER = PROMPT[:200] + prompt(150, seed=9)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def caching_cluster(tiny_model: Path) -> AsyncIterator[LocalCluster]:
    worker = WorkerConfig(max_num_batched_tokens=64)
    async with LocalCluster(ClusterSpec(model=tiny_model, worker=worker)) as cluster:
        await cluster.wait_ready()
        yield cluster


@pytest_asyncio.fixture(loop_scope="session")
async def caching(caching_cluster: LocalCluster) -> AsyncIterator[LocalCluster]:
    before = look()
    async with Client(caching_cluster.router_address) as client:
        await client.reset_prefix_cache()
    yield caching_cluster
    await come_home(caching_cluster, before)


async def test_cached_answers_equal_computed_ones(
    caching: LocalCluster, colocated: LocalCluster
) -> None:
    """First asked, asked again, and after a beginning in common; against a cluster without."""
    async with Client(colocated.router_address) as client:
        expected = [(await ask(client, p, seed=5)).token_ids for p in (PROMPT, OTHER)]
    async with Client(caching.router_address) as client:
        first = await ask(client, PROMPT, seed=5)
        again = await ask(client, PROMPT, seed=5)
        other = await ask(client, OTHER, seed=5)
        assert [first.token_ids, again.token_ids, other.token_ids] == [
            expected[0],
            expected[0],
            expected[1],
        ]
        assert first.usage.cached_tokens == 0
        # on a busy machine the router may keep a prompt from the prefill worker; tests/pair holds
        # the placements themselves
        assert again.placement.kind == "local"
        assert again.placement.reason in ("prefix_cached", "prefill_busy")
        assert again.usage.cached_tokens == 319  # one token is computed for its logits
        assert again.placement.decode_computed_prompt_tokens == 1
        assert other.usage.cached_tokens == 192
        for answer, blocks in ((first, 20), (other, 22 - 12)):  # what is cached does not travel
            assert answer.timings.transfer_blocks == (
                blocks if answer.placement.kind == "split" else 0
            )
    (decode,) = caching.workers_of(Role.DECODE)
    await scrape_until(
        decode.metrics, lambda m: m.total("prefix_cache_hits_total") >= 319 + 192, "the hits"
    )


async def test_a_reset_through_the_router_forgets_everywhere(caching: LocalCluster) -> None:
    async with Client(caching.router_address) as client:
        await ask(client, PROMPT)
        assert await client.reset_prefix_cache() >= 2 * 20
        assert await client.reset_prefix_cache() == 0
        again = await ask(client, PROMPT)
        assert again.usage.cached_tokens == 0


async def test_salted_requests_share_nothing(caching: LocalCluster) -> None:
    async with Client(caching.router_address) as client:
        answers = [await ask(client, PROMPT, cache_salt=salt) for salt in ("a", "b", "a")]
        assert [answer.usage.cached_tokens for answer in answers] == [0, 0, 319]
        assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids


async def test_a_profile_of_a_working_and_of_an_idle_engine(caching: LocalCluster) -> None:
    (decode,) = caching.workers_of(Role.DECODE)
    async with grpc.aio.insecure_channel(decode.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        request = worker_pb2.CaptureProfileRequest(num_steps=5, seconds=20)
        call = asyncio.ensure_future(stub.CaptureProfile(request, timeout=60))
        async with Client(caching.router_address) as client:
            while not call.done():
                await ask(client, prompt(30), max_tokens=8)
        reply = await call
        assert reply.steps == 5
        assert "Self CPU" in reply.table
        assert json.loads(gzip.decompress(reply.trace))["traceEvents"]

        idle = worker_pb2.CaptureProfileRequest(num_steps=5, seconds=0.2)
        reply = await stub.CaptureProfile(idle, timeout=30)
        assert (reply.steps, reply.table, reply.trace) == (0, "", b"")
