"""Live clusters of the tiny model: one split, one colocated, kept for the whole run of these
tests.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from cli.cluster.cluster_spec import ClusterSpec
from cli.cluster.local_cluster import LocalCluster
from tasuki.config import WorkerConfig
from tasuki.convert.tiny import make_tiny
from tests.integration.scrape import assert_no_leaks
from tests.leftovers import SETTLE_SECONDS, Leftovers, look

# Several chunks for every longer prompt, and no prefix cache: the same prompts are asked again and
# again, and are to travel each time.
WORKER = WorkerConfig(max_num_batched_tokens=64, prefix_caching=False)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest_asyncio.fixture(scope="session", loop_scope="session", autouse=True)
async def grpc_poller() -> AsyncIterator[None]:
    """Keep gRPC's own poller, and the two sockets that wake it, for the whole run.

    It lives as long as any channel does; without this it would come and go with each test's.
    """
    async with grpc.aio.insecure_channel("127.0.0.1:1"):
        yield


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def split_cluster(tiny_model: Path) -> AsyncIterator[LocalCluster]:
    async with LocalCluster(ClusterSpec(model=tiny_model, worker=WORKER)) as cluster:
        await cluster.wait_ready()
        yield cluster


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def colocated_cluster(tiny_model: Path) -> AsyncIterator[LocalCluster]:
    spec = ClusterSpec(model=tiny_model, prefill=0, decode=1, worker=WORKER)
    async with LocalCluster(spec) as cluster:
        await cluster.wait_ready()
        yield cluster


@pytest_asyncio.fixture(loop_scope="session")
async def split(split_cluster: LocalCluster) -> AsyncIterator[LocalCluster]:
    """The split cluster; after the test every block must be home on every worker."""
    before = look()
    yield split_cluster
    await come_home(split_cluster, before)


@pytest_asyncio.fixture(loop_scope="session")
async def colocated(colocated_cluster: LocalCluster) -> AsyncIterator[LocalCluster]:
    before = look()
    yield colocated_cluster
    await come_home(colocated_cluster, before)


async def come_home(cluster: LocalCluster, before: Leftovers) -> None:
    """Wait for the workers' blocks, and for connections that close only while the loop runs."""
    for worker in cluster.workers:
        await assert_no_leaks(worker.metrics)
    until = time.monotonic() + SETTLE_SECONDS
    while look().since(before) and time.monotonic() < until:
        gc.collect()  # a cancelled call is a cycle that holds its connection
        await asyncio.sleep(0.01)
