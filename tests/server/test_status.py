"""Code, gRPC status and HTTP status agree, and an error survives a call with class and reason."""

from __future__ import annotations

import grpc
import pytest

from tasuki import errors
from tasuki.errors import Code, TasukiError
from tasuki.messages import ErrorStatus
from tasuki.server.status import (
    REASON_KEY,
    code_of,
    error_from_rpc,
    error_from_status,
    grpc_status,
    http_status,
    to_error_status,
)

ALL_ERRORS = sorted(
    (
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, TasukiError)
    ),
    key=lambda cls: cls.__name__,
)


@pytest.mark.parametrize("code", list(Code))
def test_every_code_has_both_statuses(code: Code) -> None:
    assert code_of(grpc_status(code)) is code
    assert 200 <= http_status(code) < 600


@pytest.mark.parametrize("status", list(grpc.StatusCode))
def test_every_grpc_status_has_a_code(status: grpc.StatusCode) -> None:
    assert isinstance(code_of(status), Code)


@pytest.mark.parametrize("cls", ALL_ERRORS)
def test_an_error_survives_as_data(cls: type[TasukiError]) -> None:
    error = error_from_status(to_error_status(cls("what happened")))
    assert error.code is cls.code
    assert (error.message, error.reason) == ("what happened", cls.default_reason)
    # two classes share code and reason only by inheriting them: then the first in line stands
    assert type(error) is cls or (type(error).code, type(error).default_reason) == (
        cls.code,
        cls.default_reason,
    )


def test_an_unknown_code_is_internal_and_an_unknown_reason_is_kept() -> None:
    error = error_from_status(ErrorStatus(code="WHAT", reason="odd", message="m"))
    assert (type(error), error.code, error.reason) == (TasukiError, Code.INTERNAL, "odd")
    error = error_from_status(ErrorStatus(code="UNAVAILABLE", reason="draining", message="m"))
    assert (type(error), error.reason) == (errors.UnavailableError, "draining")


def rpc_error(status: grpc.StatusCode, reason: str | bytes | None) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata() if reason is None else grpc.aio.Metadata((REASON_KEY, reason))
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), trailing, details="said so")


@pytest.mark.parametrize(
    ("status", "reason", "expected", "expected_reason"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "no_kv", errors.NoKVError, "no_kv"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue_full", errors.QueueFullError, "queue_full"),
        (grpc.StatusCode.UNAVAILABLE, "engine_died", errors.EngineDiedError, "engine_died"),
        (grpc.StatusCode.UNAVAILABLE, None, errors.UnavailableError, "no_worker"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, None, errors.DeadlineError, "deadline"),
        (grpc.StatusCode.INVALID_ARGUMENT, b"too_long", errors.RequestTooLongError, "too_long"),
        (grpc.StatusCode.UNKNOWN, None, TasukiError, "internal"),
        (grpc.StatusCode.UNIMPLEMENTED, None, errors.UnsupportedError, "unsupported"),
    ],
)
def test_the_error_of_a_call(
    status: grpc.StatusCode,
    reason: str | bytes | None,
    expected: type[TasukiError],
    expected_reason: str,
) -> None:
    error = error_from_rpc(rpc_error(status, reason))
    assert (type(error), error.reason, error.message) == (expected, expected_reason, "said so")
