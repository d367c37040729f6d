"""grpc.health.v1 for one server: one switch for all of its services.

Written here and not taken from grpcio-health-checking because a switch must never wait for a
watcher that does not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tasuki.errors import Code, TasukiError

HEALTH_SERVICE = "grpc.health.v1.Health"
CallContext = grpc.aio.ServicerContext[Any, Any]


class UnknownServiceError(TasukiError):
    """A health check of a service that this server does not have."""

    code = Code.NOT_FOUND
    default_reason = "unknown_service"


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the package has no types
    """Answers Check and Watch for "" and every service of the server. Starts as not serving."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(("", *services))
        self._serving = False
        self._changed = asyncio.Event()

    @property
    def serving(self) -> bool:
        return self._serving

    def set_serving(self, serving: bool) -> None:
        """Switch all services at once; never blocks."""
        if serving != self._serving:
            self._serving = serving
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def Check(self, request: Any, context: CallContext) -> Any:
        if request.service not in self._services:
            raise UnknownServiceError(f"no service is named {request.service[:64]!r} here")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(self, request: Any, context: CallContext) -> None:
        while True:
            changed = self._changed
            status = self._status(request.service)
            await context.write(health_pb2.HealthCheckResponse(status=status))
            await changed.wait()

    def _status(self, service: str) -> int:
        known = health_pb2.HealthCheckResponse
        if service not in self._services:
            return int(known.SERVICE_UNKNOWN)
        return int(known.SERVING if self._serving else known.NOT_SERVING)
