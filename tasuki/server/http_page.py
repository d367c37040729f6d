"""/metrics, /healthz and /readyz over HTTP, on the process's event loop.

For scrapers and probes only: GET and HEAD, one request per connection, a few connections at once,
everything with a deadline. That it runs on the loop is the point of /healthz: a loop that is stuck
does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from tasuki.server.address import bind_error, join_host_port, require_port

MAX_REQUEST_BYTES = 16 << 10
MAX_CONNECTIONS = 32
REQUEST_SECONDS = 5.0
_PLAIN = "text/plain; charset=utf-8"
_WORDS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}


@dataclass(frozen=True)
class Response:
    status: int
    body: bytes
    content_type: str = _PLAIN

    def encode(self, with_body: bool) -> bytes:
        head = (
            f"HTTP/1.1 {self.status} {_WORDS[self.status]}\r\n"
            f"Content-Type: {self.content_type}\r\n"
            f"Content-Length: {len(self.body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + (self.body if with_body else b"")


class WithoutCreated(Collector):
    """A registry without the `_created` series, which no query of ours reads and which would
    double the page.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family


class HttpPage:
    """Make it, `start`, `close`. `why_not_ready` returns None when ready, else a reason to show."""

    def __init__(
        self, registry: CollectorRegistry, why_not_ready: Callable[[], str | None]
    ) -> None:
        self._shown = CollectorRegistry(auto_describe=False)
        self._shown.register(WithoutCreated(registry))
        self._why_not_ready = why_not_ready
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.address = ""  # host:port once started

    async def start(self, host: str, port: int) -> str:
        """Listen (0: any free port) and return host:port. Raises ConfigError naming the port."""
        require_port("--metrics-port", port)
        try:
            self._server = await asyncio.start_server(
                self._accept, host, port, limit=MAX_REQUEST_BYTES
            )
        except OSError as error:
            raise bind_error("metrics page", host, port, error) from None
        self.address = join_host_port(host, self._server.sockets[0].getsockname()[1])
        return self.address

    async def close(self) -> None:
        """Stop listening and drop open connections. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for task in tuple(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                await self._serve(reader, writer)
        except (TimeoutError, OSError, asyncio.CancelledError):
            writer.transport.abort()  # too slow, gone, or we are closing: nothing to say to it
        finally:
            self._connections.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            method, target, version = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
            if not version.startswith("HTTP/1."):
                target = ""
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            method, target = "GET", ""
        writer.write(self._respond(method, target).encode(method != "HEAD"))
        await writer.drain()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    def _respond(self, method: str, target: str) -> Response:
        if not target:
            return Response(400, b"this is no HTTP request\n")
        if method not in ("GET", "HEAD"):
            return Response(405, b"only GET and HEAD\n")
        match target.split("?", 1)[0]:
            case "/metrics":
                return Response(200, generate_latest(self._shown), CONTENT_TYPE_LATEST)
            case "/healthz":
                return Response(200, b"ok\n")
            case "/readyz":
                reason = self._why_not_ready()
                if reason is None:
                    return Response(200, b"ready\n")
                return Response(503, f"not ready: {reason}\n".encode())
            case _:
                return Response(404, b"expected /metrics, /healthz or /readyz\n")
