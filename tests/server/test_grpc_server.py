"""What every process's gRPC server does, on loopback."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tasuki.errors import ConfigError, NoKVError
from tasuki.server.grpc_server import MAX_MESSAGE_BYTES, GrpcServer, internal_channel
from tasuki.server.status import error_from_rpc
from tasuki.server.status_interceptor import StatusInterceptor
from tasuki.v1 import common_pb2, common_pb2_grpc, worker_pb2, worker_pb2_grpc

WORKER = worker_pb2.DESCRIPTOR.services_by_name["Worker"]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def describe() -> common_pb2.GetServerInfoResponse:
    return common_pb2.GetServerInfoResponse(version="9.9", config={"port": "0"})


async def reset() -> int:
    return 12


@asynccontextmanager
async def serving(
    servicer: worker_pb2_grpc.WorkerServicer | None = None,
) -> AsyncIterator[tuple[GrpcServer, grpc.aio.Channel]]:
    server = GrpcServer([WORKER], describe, reset)
    if servicer is not None:
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server.server)
    address = server.bind("127.0.0.1", 0)
    await server.start()
    channel = internal_channel(address)
    try:
        yield server, channel
    finally:
        await channel.close()
        await server.stop()


async def test_it_says_what_it_is() -> None:
    async with serving() as (server, channel):
        stub = common_pb2_grpc.ServerStub(channel)
        reply = await stub.GetServerInfo(common_pb2.GetServerInfoRequest(), timeout=5)
        assert (reply.version, dict(reply.config)) == ("9.9", {"port": "0"})
        assert server.address == f"127.0.0.1:{server.port}"


async def test_it_resets_its_prefix_cache() -> None:
    async with serving() as (_, channel):
        stub = common_pb2_grpc.ServerStub(channel)
        reply = await stub.ResetPrefixCache(common_pb2.ResetPrefixCacheRequest(), timeout=5)
        assert reply.blocks == 12


async def test_health_switches_for_all_services_at_once_and_watchers_hear_it() -> None:
    async with serving() as (server, channel):
        health = health_pb2_grpc.HealthStub(channel)
        names = ["", "tasuki.v1.Worker", "tasuki.v1.Server"]
        requests = [health_pb2.HealthCheckRequest(service=name) for name in names]
        assert {(await health.Check(r, timeout=5)).status for r in requests} == {NOT_SERVING}
        watch = health.Watch(requests[1], timeout=10)
        assert (await watch.read()).status == NOT_SERVING
        server.health.set_serving(True)
        assert (await watch.read()).status == SERVING
        assert {(await health.Check(r, timeout=5)).status for r in requests} == {SERVING}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(service="other"), timeout=5)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch.cancel()


async def test_reflection_lists_the_services() -> None:
    async with serving() as (_, channel):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for reply in stub.ServerReflectionInfo(iter([request]), timeout=5):
            names = {service.name for service in reply.list_services_response.service}
        assert {"tasuki.v1.Worker", "tasuki.v1.Server", "grpc.health.v1.Health"} <= names


async def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = GrpcServer([WORKER], describe, reset)
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            server.bind("127.0.0.1", port)
        await server.stop()


async def test_two_servers_cannot_share_a_port() -> None:
    async with serving() as (first, _):
        second = GrpcServer([WORKER], describe, reset)
        with pytest.raises(ConfigError, match="in use"):
            second.bind("127.0.0.1", first.port)
        await second.stop()


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70000), ("no.such.host.invalid", 0)])
async def test_an_impossible_address_is_refused(host: str, port: int) -> None:
    server = GrpcServer([WORKER], describe, reset)
    with pytest.raises(ConfigError):
        server.bind(host, port)
    await server.stop()


async def drained(call: Any) -> None:
    """Read a stream to its end."""
    while await call.read() is not grpc.aio.EOF:
        pass


class Failing(worker_pb2_grpc.WorkerServicer):
    """Raises in both forms of a handler."""

    Link = Prefill = Watch = CaptureProfile = InjectFault = None  # type: ignore[assignment]  # not called

    async def Drain(self, request: Any, context: Any) -> Any:
        raise NoKVError("no blocks came free")

    async def Decode(self, request: Any, context: Any) -> Any:
        yield worker_pb2.DecodeEvent(local=worker_pb2.Local(reason="first"))
        raise ZeroDivisionError("secret detail")


async def test_typed_errors_become_statuses() -> None:
    async with serving(Failing()) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_pb2_grpc.WorkerStub(channel).Drain(worker_pb2.DrainRequest(), timeout=5)
        error = error_from_rpc(caught.value)
        assert (type(error), error.message) == (NoKVError, "no blocks came free")


async def test_a_bug_becomes_internal_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Failing()) as (_, channel):
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        call = stub.Decode(worker_pb2.DecodeRequest(), timeout=5)
        assert (await call.read()).local.reason == "first"
        with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in str(caught.value.details())
        assert "secret detail" in caplog.text
        caplog.clear()  # its record holds the traceback, and with it the server


async def test_an_unknown_method_is_unimplemented() -> None:
    async with serving() as (_, channel):
        call: Any = channel.unary_unary("/tasuki.v1.Worker/NoSuchMethod")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"", timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_message_over_the_bound_is_refused_and_the_server_lives() -> None:
    async with serving(Failing()) as (_, channel):
        stub = worker_pb2_grpc.WorkerStub(channel)
        huge = worker_pb2.DecodeRequest(request_id="x" * (MAX_MESSAGE_BYTES + 1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Decode(huge, timeout=10).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        describe_stub = common_pb2_grpc.ServerStub(channel)
        await describe_stub.GetServerInfo(common_pb2.GetServerInfoRequest(), timeout=5)


async def test_stop_ends_a_health_watch() -> None:
    async with serving() as (server, channel):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        async with asyncio.timeout(5):
            await server.stop()
            with pytest.raises(grpc.aio.AioRpcError):
                await drained(watch)


@dataclass
class Details:
    method: str


class GoneCaller:
    """A context whose call is over: what its caller cannot read any more cannot be sent."""

    async def abort(self, code: Any, details: str, trailing: Any) -> None:
        raise grpc.aio.InternalError("the batch could not be executed")


@pytest.mark.parametrize(
    "error", [NoKVError("nobody reads this"), grpc.aio.InternalError("nor what was written")]
)
async def test_an_error_for_a_caller_that_is_gone_counts_as_a_cancel(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC takes anything else for a bug of the handler, and logs its stack."""

    async def refuse(request: Any, context: Any) -> None:
        raise error

    async def call(details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(refuse)

    details: Any = Details("/tasuki.v1.Worker/Decode")
    handler = await StatusInterceptor().intercept_service(call, details)
    assert handler is not None
    behaviour: Any = handler.unary_unary
    with pytest.raises(asyncio.CancelledError):
        await behaviour(None, GoneCaller())
    assert not caplog.records
