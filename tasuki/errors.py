"""Every error a user of tasuki can meet, each with the status code it maps to.

Knows nothing about gRPC or HTTP: `tasuki.server.status` turns a `Code` into either, in one place.
A message says what was wrong, what was expected, and what to do.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class Code(StrEnum):
    """The canonical status names of gRPC, as plain strings so that the core needs no gRPC."""

    OK = "OK"
    CANCELLED = "CANCELLED"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"
    UNAVAILABLE = "UNAVAILABLE"


class TasukiError(Exception):
    """Base of all typed errors. `reason` is a bounded word for metrics; the message is for
    people.
    """

    code: ClassVar[Code] = Code.INTERNAL
    default_reason: ClassVar[str] = "internal"

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason


class ConfigError(TasukiError):
    """A flag, environment variable or file that cannot be used; raised at start only."""

    code = Code.INVALID_ARGUMENT
    default_reason = "config"


class ModelError(TasukiError):
    """A model directory that is missing, damaged, unsupported, or does not fit the device."""

    code = Code.FAILED_PRECONDITION
    default_reason = "model"


class InvalidRequestError(TasukiError):
    """A request that no worker could ever serve. Never retried."""

    code = Code.INVALID_ARGUMENT
    default_reason = "invalid"


class RequestTooLongError(InvalidRequestError):
    """A prompt that fits neither the model's positions nor the largest KV cache."""

    default_reason = "too_long"


class UnknownModelError(TasukiError):
    """A request that names a model this cluster does not serve."""

    code = Code.NOT_FOUND
    default_reason = "invalid"


class WrongRoleError(TasukiError):
    """A call that this process's role does not serve; the caller's registry is wrong."""

    code = Code.FAILED_PRECONDITION
    default_reason = "wrong_role"


class UnsupportedError(TasukiError):
    """A method that the other side does not know: its version is older, or it is no tasuki."""

    code = Code.UNIMPLEMENTED
    default_reason = "unsupported"


class QueueFullError(TasukiError):
    """A bounded queue has no room; the caller may try again later."""

    code = Code.RESOURCE_EXHAUSTED
    default_reason = "queue_full"


class NoKVError(TasukiError):
    """No KV blocks became free in time; nothing was sent yet, so the router may place elsewhere."""

    code = Code.RESOURCE_EXHAUSTED
    default_reason = "no_kv"


class DeadlineError(TasukiError):
    """The request's own deadline passed."""

    code = Code.DEADLINE_EXCEEDED
    default_reason = "deadline"


class CancelledError(TasukiError):
    """The caller went away or cancelled."""

    code = Code.CANCELLED
    default_reason = "cancelled"


class UnavailableError(TasukiError):
    """No live worker can take the request now, or the one that held it went away."""

    code = Code.UNAVAILABLE
    default_reason = "no_worker"


class EngineDiedError(UnavailableError):
    """The engine process behind a server ended; every stream of that epoch ends with this."""

    default_reason = "engine_died"


class TransferError(TasukiError):
    """A link or a message on it failed. The receiver falls back; the client never sees this."""

    code = Code.UNAVAILABLE
    default_reason = "link_down"


class LayoutMismatchError(TransferError):
    """Two workers disagree about the shape of KV; the message names the first such field."""

    code = Code.FAILED_PRECONDITION
    default_reason = "layout"


class FenceLostError(TransferError):
    """A channel could not promise that no byte will be written any more; the process must exit."""

    code = Code.INTERNAL
    default_reason = "fence"


_BY_REASON: tuple[type[TasukiError], ...] = (
    ConfigError,
    ModelError,
    InvalidRequestError,
    RequestTooLongError,
    UnknownModelError,
    WrongRoleError,
    UnsupportedError,
    QueueFullError,
    NoKVError,
    DeadlineError,
    CancelledError,
    UnavailableError,
    EngineDiedError,
    TransferError,
    LayoutMismatchError,
    FenceLostError,
)
_BY_CODE: dict[Code, type[TasukiError]] = {
    Code.INVALID_ARGUMENT: InvalidRequestError,
    Code.NOT_FOUND: UnknownModelError,
    Code.FAILED_PRECONDITION: ModelError,
    Code.UNIMPLEMENTED: UnsupportedError,
    Code.RESOURCE_EXHAUSTED: QueueFullError,
    Code.DEADLINE_EXCEEDED: DeadlineError,
    Code.CANCELLED: CancelledError,
    Code.UNAVAILABLE: UnavailableError,
}


def error_class_for(code: Code, reason: str) -> type[TasukiError]:
    """The class an error had on the other side: by code and reason, else the one for the code."""
    for cls in _BY_REASON:
        if cls.code is code and cls.default_reason == reason:
            return cls
    return _BY_CODE.get(code, TasukiError)
