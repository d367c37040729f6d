"""The one place where an error becomes a gRPC or HTTP status, and a gRPC status an error again.

A status carries the error's code, its message as details, and its reason as the trailing metadata
`tasuki-reason`; a status without that reason came from gRPC itself or from a stranger.
"""

from __future__ import annotations

from typing import Any, NoReturn

import grpc

from tasuki.errors import Code, TasukiError, error_class_for
from tasuki.messages import ErrorStatus

REASON_KEY = "tasuki-reason"

_FOREIGN_CODES = {
    grpc.StatusCode.OUT_OF_RANGE: Code.INVALID_ARGUMENT,
    grpc.StatusCode.ALREADY_EXISTS: Code.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED: Code.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED: Code.FAILED_PRECONDITION,
    grpc.StatusCode.ABORTED: Code.UNAVAILABLE,
}
_HTTP = {
    Code.OK: 200,
    Code.CANCELLED: 499,  # the caller closed its request: nobody reads this
    Code.INVALID_ARGUMENT: 400,
    Code.NOT_FOUND: 404,
    Code.DEADLINE_EXCEEDED: 504,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 412,
    Code.UNIMPLEMENTED: 501,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
}


def grpc_status(code: Code) -> grpc.StatusCode:
    """The gRPC status of a code: they share their names."""
    return grpc.StatusCode[code.value]


def code_of(status: grpc.StatusCode) -> Code:
    """The code of a gRPC status; one that tasuki never sends becomes the nearest that it does."""
    try:
        return Code(status.name)
    except ValueError:
        return _FOREIGN_CODES.get(status, Code.INTERNAL)


def http_status(code: Code) -> int:
    """The HTTP status of a code."""
    return _HTTP[code]


def to_error_status(error: TasukiError) -> ErrorStatus:
    """An error as data, for a frame to the engine."""
    return ErrorStatus(code=error.code, reason=error.reason, message=error.message)


def error_from_status(status: ErrorStatus) -> TasukiError:
    """The typed error that `to_error_status`, here or in an engine, was given."""
    try:
        code = Code(status.code)
    except ValueError:
        code = Code.INTERNAL
    return error_class_for(code, status.reason)(status.message, reason=status.reason or None)


def error_from_rpc(error: grpc.aio.AioRpcError) -> TasukiError:
    """The typed error that the other side of a call ended it with."""
    code = code_of(error.code())
    value = (error.trailing_metadata() or {}).get(REASON_KEY, "")
    reason = value if isinstance(value, str) else value.decode("ascii", "replace")
    message = error.details() or f"the call ended with {error.code().name}"
    return error_class_for(code, reason)(message, reason=reason or None)


def is_ours(error: grpc.aio.AioRpcError) -> bool:
    """Whether tasuki ended the call with it, and not gRPC: then a reason comes along."""
    return REASON_KEY in (error.trailing_metadata() or {})


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: TasukiError) -> NoReturn:
    """End a call with an error. Never returns."""
    await context.abort(grpc_status(error.code), error.message, ((REASON_KEY, error.reason),))
