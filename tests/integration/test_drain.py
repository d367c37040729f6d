"""A process that is told to go takes nothing new, finishes or hands over, and exits 0."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
import pytest_asyncio

from cli.cluster.cluster_spec import ClusterSpec
from cli.cluster.local_cluster import LocalCluster
from tasuki.client import Client
from tasuki.config import WorkerConfig
from tasuki.messages import Role
from tasuki.server.grpc_server import internal_channel
from tasuki.v1 import worker_pb2, worker_pb2_grpc
from tests.integration.faults import CRAWL, SLOWABLE, inject
from tests.integration.scrape import assert_no_leaks, scrape, scrape_until
from tests.integration.streams import Answer, ask, prompt

pytestmark = [pytest.mark.dist, pytest.mark.asyncio(loop_scope="session")]

TOKENS = 1700
PROMPTS = [prompt(300, seed=f"drain {n}") for n in range(4)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def expected(colocated_cluster: LocalCluster) -> list[list[int]]:
    async with Client(colocated_cluster.router_address) as client:
        return [(await ask(client, ids, max_tokens=TOKENS)).token_ids for ids in PROMPTS]


async def ask_all(target: str) -> list[Answer]:
    async with Client(target) as client:
        return list(await asyncio.gather(*(ask(client, ids, max_tokens=TOKENS) for ids in PROMPTS)))


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("grace", [0.1, 30.0])
async def test_a_decode_worker_finishes_or_hands_over(
    tiny_model: Path, expected: list[list[int]], grace: float
) -> None:
    spec = ClusterSpec(
        model=tiny_model, decode=2, worker=WorkerConfig(drain_timeout=grace), stop_timeout=60.0
    )
    async with LocalCluster(spec) as cluster:
        await cluster.wait_ready()
        leaving, staying = cluster.workers_of(Role.DECODE)
        asked = asyncio.ensure_future(ask_all(cluster.router_address))
        await scrape_until(
            cluster.router.metrics, lambda m: m.total("ttft_seconds_count") == 4, "4 streams"
        )
        cluster.kill(leaving, signal.SIGTERM)
        assert await cluster.wait_exit(leaving) == 0
        answers = await asked
        assert tokens(answers) == expected
        router = await scrape(cluster.router.metrics)
        handed_over = router.total("migrations_total", reason="draining")
        assert (handed_over > 0) == (grace < 1)
        assert router.total("migrations_total") == handed_over
        async with Client(cluster.router_address) as client:
            after = await ask(client, PROMPTS[0], max_tokens=2)
        assert after.placement.decode_worker_id == staying.worker_id
        for worker in (staying, *cluster.workers_of(Role.PREFILL)):
            await assert_no_leaks(worker.metrics)


async def test_a_prefill_worker_pays_what_it_owes(
    tiny_model: Path, expected: list[list[int]]
) -> None:
    spec = ClusterSpec(model=tiny_model, worker=SLOWABLE, stop_timeout=60.0)
    async with LocalCluster(spec) as cluster:
        await cluster.wait_ready()
        (prefill,), (decode,) = map(cluster.workers_of, (Role.PREFILL, Role.DECODE))
        await inject(prefill, "slow", CRAWL)
        async with Client(cluster.router_address) as client:
            asked = asyncio.ensure_future(ask(client, PROMPTS[0], max_tokens=TOKENS))
            await scrape_until(
                decode.metrics, lambda m: m.total("kv_received_bytes_total") > 0, "some KV"
            )
            cluster.kill(prefill, signal.SIGTERM)
            assert await cluster.wait_exit(prefill) == 0
            answer = await asked
            assert answer.token_ids == expected[0]
            assert (answer.placement.kind, answer.placement.fallback_reason) == ("split", "")
            after = await ask(client, PROMPTS[1], max_tokens=2)
            assert after.placement.kind == "local"
        await assert_no_leaks(decode.metrics)


async def test_drain_by_call_takes_nothing_new_and_goes_on(
    tiny_model: Path, expected: list[list[int]]
) -> None:
    async with LocalCluster(ClusterSpec(model=tiny_model, decode=2)) as cluster:
        await cluster.wait_ready()
        leaving, staying = cluster.workers_of(Role.DECODE)
        asked = asyncio.ensure_future(ask_all(cluster.router_address))
        await scrape_until(
            cluster.router.metrics, lambda m: m.total("ttft_seconds_count") == 4, "4 streams"
        )
        async with internal_channel(leaving.address) as channel:
            await worker_pb2_grpc.WorkerStub(channel).Drain(worker_pb2.DrainRequest(), timeout=5)
        assert tokens(await asked) == expected
        async with Client(cluster.router_address) as client:
            for _ in range(3):
                after = await ask(client, PROMPTS[0], max_tokens=2)
                assert after.placement.decode_worker_id == staying.worker_id
        cluster.kill(leaving, signal.SIGTERM)
        assert await cluster.wait_exit(leaving) == 0


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
async def test_a_router_that_goes_leaves_its_streams_to_another(
    tiny_model: Path, expected: list[list[int]], end: signal.Signals
) -> None:
    spec = ClusterSpec(model=tiny_model, routers=2, stop_timeout=1.0)
    async with LocalCluster(spec) as cluster:
        await cluster.wait_ready()
        first, second = cluster.routers
        asked = asyncio.ensure_future(ask_all(cluster.router_addresses))
        await scrape_until(first.metrics, lambda m: m.total("ttft_seconds_count") == 4, "4 streams")
        cluster.kill(first, end)
        await cluster.wait_exit(first)
        assert tokens(await asked) == expected
        metrics = await scrape(second.metrics)
        if end is signal.SIGKILL:
            assert metrics.total("requests_total", outcome="completed") == 4
        again = await cluster.restart(first)
        assert again.address == first.address
        assert tokens(await ask_all(again.address)) == expected
        for worker in cluster.workers:
            await assert_no_leaks(worker.metrics)
