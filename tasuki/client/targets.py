"""The routers a client may ask, and their connections. Knows nothing about requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from tasuki.errors import ConfigError
from tasuki.v1 import common_pb2_grpc, inference_pb2_grpc

MAX_MESSAGE_BYTES = 16 << 20
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),  # clusters are reached directly
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # how long an attempt may take
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


@dataclass(frozen=True)
class Target:
    """One router (or any process, for what every process answers). Connects with its first call."""

    address: str
    channel: grpc.aio.Channel
    inference: inference_pb2_grpc.InferenceAsyncStub
    server: common_pb2_grpc.ServerAsyncStub

    @classmethod
    def connect(cls, address: str) -> Target:
        channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        return cls(
            address,
            channel,
            inference_pb2_grpc.InferenceStub(channel),
            common_pb2_grpc.ServerStub(channel),
        )


class Targets:
    """All of them; one is asked, until it is lost. Raises ConfigError for an empty list."""

    def __init__(self, given: str | Sequence[str]) -> None:
        """A list, or one string with commas."""
        names = given.split(",") if isinstance(given, str) else given
        addresses = [name.strip() for name in names if name.strip()]
        if not addresses:
            raise ConfigError("no target is named; expected host:port, or several with commas")
        self._targets = [Target.connect(address) for address in dict.fromkeys(addresses)]
        self._current = 0

    def __len__(self) -> int:
        return len(self._targets)

    def __str__(self) -> str:
        return ",".join(target.address for target in self._targets)

    @property
    def current(self) -> Target:
        return self._targets[self._current]

    def lose(self, target: Target) -> None:
        """Ask the next one from now on, unless another call has seen to that."""
        if target is self.current:
            self._current = (self._current + 1) % len(self._targets)

    async def close(self) -> None:
        for target in self._targets:
            await target.channel.close()
