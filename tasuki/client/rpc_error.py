"""The typed error behind the status of a call, as a client sees it."""

from __future__ import annotations

import grpc

from tasuki.errors import Code, TasukiError, error_class_for

REASON_KEY = "tasuki-reason"


def error_from_rpc(error: grpc.aio.AioRpcError, target: str) -> TasukiError:
    """The error that the cluster raised; a status of gRPC's own names the target."""
    try:
        code = Code(error.code().name)
    except ValueError:
        code = Code.INTERNAL  # a status that tasuki never sends
    value = (error.trailing_metadata() or {}).get(REASON_KEY, "")
    reason = value if isinstance(value, str) else value.decode("ascii", "replace")
    message = error.details() or f"the call ended with {error.code().name}"
    if not reason:
        message = f"{target}: {message}"
    return error_class_for(code, reason)(message, reason=reason or None)
