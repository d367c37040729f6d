"""One live split cluster for all of these tests, small and quick to give up; it must be whole again
after each of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from cli.cluster.cluster_spec import ClusterSpec
from cli.cluster.local_cluster import LocalCluster
from router.config import RouterConfig
from tasuki.client import Client
from tasuki.convert.tiny import make_tiny
from tests.failures.struck import NEXT, PEER_TIMEOUT, PROMPT, REPORT_TIMEOUT, Struck
from tests.integration.faults import BLOCK_BYTES, SLOWABLE
from tests.leftovers import SETTLE_SECONDS, look

WORKER = dataclasses.replace(
    SLOWABLE,
    engine_restarts=1_000_000,
    max_num_batched_tokens=16,
    kv_blocks=160,  # the longest request needs 128
    prefix_caching=False,
    peer_timeout=PEER_TIMEOUT,
    handoff_timeout=1.5,
    reserve_timeout=1.0,
)
ROUTER = RouterConfig(
    decode_workers="127.0.0.1:1", report_timeout=REPORT_TIMEOUT, split_min_tokens=1
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def struck_cluster(tiny_model: Path) -> AsyncIterator[Struck]:
    slower = {"prefill-0": {"max_num_batched_tokens": 8}}  # so that computing takes a moment
    spec = ClusterSpec(model=tiny_model, worker=WORKER, router=ROUTER, overrides=slower)
    async with (
        grpc.aio.insecure_channel("127.0.0.1:1"),  # keeps gRPC's own poller for the whole run
        LocalCluster(spec) as cluster,
    ):
        await cluster.wait_ready()
        async with Client(cluster.workers[0].address) as worker:
            assert int((await worker.server_info()).facts["block_bytes"]) == BLOCK_BYTES
        yield Struck(cluster)


@pytest_asyncio.fixture(loop_scope="session")
async def struck(struck_cluster: Struck) -> AsyncIterator[Struck]:
    before = look()
    async with Client(struck_cluster.cluster.router_address) as client:
        struck_cluster.client = client
        for token_ids in (PROMPT, NEXT):
            await struck_cluster.expected(token_ids)
        yield struck_cluster
        await struck_cluster.mended()
    until = time.monotonic() + SETTLE_SECONDS
    while look().since(before) and time.monotonic() < until:
        gc.collect()  # a cancelled call is a cycle that holds its connection
        await asyncio.sleep(0.01)
