"""A gRPC server as every process has one, and the channels between processes.

Bounds, keepalive, health, reflection, `tasuki.v1.Server` and statuses are the same everywhere and
are set up here; what a process serves besides is registered by its owner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tasuki.errors import ConfigError
from tasuki.server.address import bind_error, join_host_port, probe, require_port
from tasuki.server.health import HEALTH_SERVICE, Health
from tasuki.server.status_interceptor import StatusInterceptor
from tasuki.v1 import common_pb2, common_pb2_grpc

MAX_MESSAGE_BYTES = 16 << 20
_BOUNDS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    *_BOUNDS,
    ("grpc.so_reuseport", 0),  # else a second process binds a used port without an error
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
]
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_BOUNDS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # how long an attempt may take
    ("grpc.max_reconnect_backoff_ms", 1_000),  # a worker that restarts is back within a second
]

ServerFacts = Callable[[], common_pb2.GetServerInfoResponse]
CacheReset = Callable[[], Awaitable[int]]


class ServerService(common_pb2_grpc.ServerServicer):
    """`tasuki.v1.Server`: what every process says about itself and does for its operator."""

    def __init__(self, describe: ServerFacts, reset_prefix_cache: CacheReset) -> None:
        self._describe = describe
        self._reset_prefix_cache = reset_prefix_cache

    async def GetServerInfo(
        self,
        request: common_pb2.GetServerInfoRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> common_pb2.GetServerInfoResponse:
        return self._describe()

    async def ResetPrefixCache(
        self,
        request: common_pb2.ResetPrefixCacheRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> common_pb2.ResetPrefixCacheResponse:
        return common_pb2.ResetPrefixCacheResponse(blocks=await self._reset_prefix_cache())


class GrpcServer:
    """Make it, register services on `server`, `bind`, `start`, `stop`. Not serving until told."""

    def __init__(
        self,
        services: list[ServiceDescriptor],
        describe: ServerFacts,
        reset_prefix_cache: CacheReset,
    ) -> None:
        """`services` are those that the owner registers on `server`; health and reflection name
        them. `describe` answers GetServerInfo, `reset_prefix_cache` does what it says and returns
        how many blocks were forgotten.
        """
        own = common_pb2.DESCRIPTOR.services_by_name["Server"].full_name
        names = [*(service.full_name for service in services), own]
        self.server = grpc.aio.server(interceptors=[StatusInterceptor()], options=SERVER_OPTIONS)
        self.health = Health(names)
        self.address = ""  # host:port once bound
        self.port = 0
        service = ServerService(describe, reset_prefix_cache)
        common_pb2_grpc.add_ServerServicer_to_server(service, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        reflection.enable_server_reflection(
            (*names, HEALTH_SERVICE, reflection.SERVICE_NAME), self.server
        )

    def bind(self, host: str, port: int) -> str:
        """Take a port (0: any free one) and return host:port. Raises ConfigError naming it."""
        require_port("--port", port)
        address = join_host_port(host, port)
        with contextlib.suppress(RuntimeError):
            self.port = self.server.add_insecure_port(address)
        if not self.port:
            refused = probe(host, port)
            if refused is None:
                raise ConfigError(f"gRPC cannot listen on {address}; check host and port")
            raise bind_error("gRPC", host, port, refused)
        self.address = join_host_port(host, self.port)
        return self.address

    async def start(self) -> None:
        """Answer calls; health says NOT_SERVING until `health.set_serving(True)`."""
        await self.server.start()

    async def stop(self, grace: float = 0.0) -> None:
        """Say NOT_SERVING, take no new calls, and cancel those that outlast `grace` seconds."""
        self.health.set_serving(False)
        await self.server.stop(grace)


def internal_channel(address: str) -> grpc.aio.Channel:
    """A channel between two processes of a cluster: no proxy, the same bounds, quick reconnects."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
