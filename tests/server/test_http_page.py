"""The metrics and health page: what it answers, what it refuses, that nothing stays behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry, Counter

from tasuki.errors import ConfigError
from tasuki.server.http_page import MAX_CONNECTIONS, HttpPage


async def talk(address: str, request: bytes) -> tuple[int, str, str]:
    """Send bytes; returns status, head and body. Status 0: the connection was dropped."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        async with asyncio.timeout(10):
            answer = await reader.read()
    except ConnectionError:
        return 0, "", ""
    finally:
        writer.close()
    head, _, body = answer.decode().partition("\r\n\r\n")
    return int(head.split(" ")[1]) if head else 0, head, body


async def get(address: str, path: str) -> tuple[int, str, str]:
    return await talk(address, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


class Readiness:
    reason: str | None = "warming up"

    def __call__(self) -> str | None:
        return self.reason


@asynccontextmanager
async def page(readiness: Readiness | None = None) -> AsyncIterator[HttpPage]:
    registry = CollectorRegistry()
    Counter("seen", "Things seen.", registry=registry).inc(3)
    made = HttpPage(registry, readiness or Readiness())
    threads = threading.active_count()
    await made.start("127.0.0.1", 0)
    try:
        yield made
    finally:
        await made.close()
        assert threading.active_count() == threads


async def test_metrics() -> None:
    async with page() as made:
        status, head, body = await get(made.address, "/metrics?x=1")
        assert status == 200
        assert "text/plain" in head
        assert "seen_total 3.0" in body
        assert "_created" not in body


async def test_health_and_readiness_are_two_things() -> None:
    readiness = Readiness()
    async with page(readiness) as made:
        assert (await get(made.address, "/healthz"))[::2] == (200, "ok\n")
        assert (await get(made.address, "/readyz"))[::2] == (503, "not ready: warming up\n")
        readiness.reason = None
        assert (await get(made.address, "/readyz"))[::2] == (200, "ready\n")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /other HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"\x16\x03\x01 nonsense\r\n\r\n", 400),
        (b"x" * 40000, 400),
        (b"GET\r\n\r\n", 400),
    ],
)
async def test_what_it_refuses(request_bytes: bytes, status: int) -> None:
    async with page() as made:
        answered = (await talk(made.address, request_bytes))[0]
        assert answered == status or (status == 400 and answered == 0)  # reset while still sending
        assert (await get(made.address, "/healthz"))[0] == 200


async def test_head_has_no_body() -> None:
    async with page() as made:
        status, head, body = await talk(made.address, b"HEAD /healthz HTTP/1.1\r\n\r\n")
        assert (status, body) == (200, "")
        assert "Content-Length: 3" in head


async def test_silent_connections_neither_block_nor_outlive_it() -> None:
    async with page() as made:
        host, port = made.address.rsplit(":", 1)
        silent = [
            await asyncio.open_connection(host, int(port)) for _ in range(MAX_CONNECTIONS - 1)
        ]
        assert (await get(made.address, "/healthz"))[0] == 200
        await made.close()
        for reader, writer in silent:
            async with asyncio.timeout(5):
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await reader.readexactly(1)
            writer.close()


async def test_one_connection_too_many_is_dropped() -> None:
    async with page() as made:
        host, port = made.address.rsplit(":", 1)
        held = [await asyncio.open_connection(host, int(port)) for _ in range(MAX_CONNECTIONS)]
        assert (await get(made.address, "/healthz"))[0] == 0
        for _, writer in held:
            writer.close()


async def test_a_port_in_use_is_named() -> None:
    async with page() as made:
        port = int(made.address.rsplit(":", 1)[1])
        other = HttpPage(CollectorRegistry(), Readiness())
        with pytest.raises(ConfigError, match=f"port {port}"):
            await other.start("127.0.0.1", port)
        with pytest.raises(ConfigError, match="--metrics-port"):
            await other.start("127.0.0.1", -1)
