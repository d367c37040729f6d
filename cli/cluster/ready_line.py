"""The one line of JSON that a process writes when it is ready, as its parent reads it."""

from __future__ import annotations

import msgspec


class ReadyLine(msgspec.Struct, frozen=True, kw_only=True):
    """Who a process is and where it listens. Addresses are host:port; a router has no engine."""

    role: str
    worker_id: str
    address: str  # gRPC
    metrics: str  # HTTP: /metrics, /healthz, /readyz
    pid: int
    engine_pid: int


def parse_ready_line(line: bytes) -> ReadyLine:
    """Decode one ready line. Raises ValueError saying what is missing or of the wrong type."""
    return msgspec.json.decode(line, type=ReadyLine)
