"""A worker's server with a fake engine on loopback, and stubs to call it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tasuki.config import WorkerConfig
from tasuki.messages import DecodeRequest, PrefillTarget, Role
from tasuki.server.grpc_server import internal_channel
from tasuki.server.worker_server import WorkerServer
from tasuki.v1 import common_pb2_grpc, worker_pb2, worker_pb2_grpc
from tasuki.wire.decode import decode_request_to_proto
from tests.server.fake_engine import GREEDY, FakeEngine


@dataclass
class RunningWorker:
    server: WorkerServer
    engine: FakeEngine
    stub: worker_pb2_grpc.WorkerAsyncStub
    describe: common_pb2_grpc.ServerAsyncStub
    health: health_pb2_grpc.HealthStub
    engines: list[FakeEngine]  # all that there were, `engine` the first

    @property
    def target(self) -> PrefillTarget:
        return PrefillTarget(
            worker_id=self.server.state.worker_id,
            worker_epoch=self.engine.epoch,
            address=self.server.state.address,
        )

    async def serving(self, service: str = "") -> bool:
        request = health_pb2.HealthCheckRequest(service=service)
        reply = await self.health.Check(request, timeout=5)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def check_nothing_is_left(self) -> None:
        """Every per-stream map is empty."""
        server = self.server
        assert len(server.streams) == 0
        assert len(server.calls) == 0
        assert len(server.links) == 0
        assert len(server.watches) == 0
        assert len(server.channels) == 0


@asynccontextmanager
async def running(
    role: Role, *, started: bool = True, epoch: int = 0xABC, restarts: int = 0, **settings: Any
) -> AsyncIterator[RunningWorker]:
    """A started worker; at the end it is closed, and nothing of it may be left. Every engine that
    takes the place of one that died has the next epoch.
    """
    engines: list[FakeEngine] = []

    def make(config: WorkerConfig) -> FakeEngine:
        engines.append(FakeEngine(config, epoch=epoch + len(engines)))
        return engines[-1]

    server = WorkerServer(
        role, WorkerConfig(model="tiny", engine_restarts=restarts, **settings), make
    )
    engine = engines[0]
    channel = internal_channel(server.state.address)
    worker = RunningWorker(
        server,
        engine,
        worker_pb2_grpc.WorkerStub(channel),
        common_pb2_grpc.ServerStub(channel),
        health_pb2_grpc.HealthStub(channel),
        engines,
    )
    try:
        if started:
            await server.start()
        yield worker
    finally:
        await channel.close()
        await server.close()
        worker.check_nothing_is_left()
        assert all(engine.closed for engine in engines)


def decode_request(
    request_id: str = "r1", *, timeout: float | None = None
) -> worker_pb2.DecodeRequest:
    return decode_request_to_proto(
        DecodeRequest(
            request_id=request_id,
            prompt_token_ids=[1, 2],
            output_token_ids=[],
            sampling=GREEDY,
            prefill_candidates=[],
            local_reason="no_prefill_worker",
            timeout=timeout,
        )
    )


async def rpc_error(call: object) -> grpc.aio.AioRpcError:
    """Read a stream to its end, which must be an error; returns it."""
    try:
        async for _ in call:  # type: ignore[attr-defined]  # any kind of stream call
            pass
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call ended well")
