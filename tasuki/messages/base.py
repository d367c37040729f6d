"""What all messages share: their base, a worker's role, errors as data."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(StrEnum):
    STOP = "stop"  # EOS or a stop token was sampled
    LENGTH = "length"  # max_tokens, or the model's last position
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Base of everything below: immutable, and tagged by its class name on the wire."""


class ErrorStatus(Message, frozen=True):
    """An error as data: `code` is a `tasuki.errors.Code`, `reason` a bounded word for metrics."""

    code: str
    reason: str
    message: str


class PrefillTarget(Message, frozen=True):
    """One prefill worker as a router or a decode worker knows it."""

    worker_id: str
    worker_epoch: int
    address: str  # host:port of its gRPC server
