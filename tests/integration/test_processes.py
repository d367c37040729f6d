"""What the processes are made of, and that they answer while the engine is busy."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.cluster.local_cluster import LocalCluster
from tasuki.client import Client
from tests.integration.streams import ask, keep_prefilling, prompt

pytestmark = [pytest.mark.dist, pytest.mark.asyncio(loop_scope="session")]


def maps_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


async def test_server_processes_and_the_router_never_load_torch(split: LocalCluster) -> None:
    async with Client(split.router_address) as client:
        await ask(client, prompt(100), max_tokens=2)
    assert not maps_torch(split.router.pid)
    for worker in split.workers:
        assert not maps_torch(worker.pid)
        assert maps_torch(worker.engine_pid)  # the test can tell


async def test_health_and_reflection_on_every_process(split: LocalCluster) -> None:
    for process in (split.router, *split.workers):
        async with grpc.aio.insecure_channel(process.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            reflection: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
            )
            call = reflection(timeout=5)
            await call.write(b"\x3a\x01*")  # list_services
            answer_bytes = await call.read()
            assert isinstance(answer_bytes, bytes)
            assert b"tasuki.v1" in answer_bytes
            call.cancel()
        async with Client(process.address) as client:
            info = await client.server_info()
        assert info.config["model"]


async def test_health_answers_within_300_ms_during_a_long_prefill(split: LocalCluster) -> None:
    checked = asyncio.Event()
    async with Client(split.router_address) as client:
        busy = [
            asyncio.ensure_future(keep_prefilling(client, f"health {number}", checked))
            for number in range(4)
        ]
        worst = 0.0
        for worker in split.workers:
            async with grpc.aio.insecure_channel(worker.address) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                for _ in range(20):
                    begin = time.monotonic()
                    await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
                    worst = max(worst, time.monotonic() - begin)
        checked.set()
        assert all(await asyncio.gather(*busy))
    assert worst < 0.3
