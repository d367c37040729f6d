"""What several messages share on the wire: finish reasons, roles, ids, workers.

Each `*_from_proto` takes what a stranger may have sent and raises InvalidRequestError for what is
malformed, never anything else; each `*_to_proto` takes what tasuki made. The messages themselves
stand in `decode`, `prefill`, `link`, `watch` and `sampling`.
"""

from __future__ import annotations

import math
import re

from tasuki.errors import InvalidRequestError
from tasuki.messages import FinishReason, PrefillTarget, Role
from tasuki.v1 import common_pb2, worker_pb2

MAX_NAME = 256  # characters of a name that travels in every message
_ID = re.compile(r"[0-9a-f]{32}")

_FINISH_TO_PROTO = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
    FinishReason.DEADLINE: common_pb2.FINISH_REASON_DEADLINE,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}
_FINISH_FROM_PROTO = {value: reason for reason, value in _FINISH_TO_PROTO.items()}
_ROLE_TO_PROTO = {
    Role.PREFILL: common_pb2.ROLE_PREFILL,
    Role.DECODE: common_pb2.ROLE_DECODE,
}
_ROLE_FROM_PROTO = {value: role for role, value in _ROLE_TO_PROTO.items()}


def finish_reason_to_proto(reason: FinishReason | None) -> common_pb2.FinishReason.ValueType:
    """None, for a request that goes on, is FINISH_REASON_UNSPECIFIED."""
    return common_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_TO_PROTO[reason]


def finish_reason_from_proto(value: int) -> FinishReason | None:
    if value == common_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    reason = _FINISH_FROM_PROTO.get(value)  # type: ignore[call-overload]  # an open enum: any int
    if reason is None:
        raise InvalidRequestError(f"finish_reason {value} is unknown; is the sender newer?")
    return FinishReason(reason)


def role_to_proto(role: Role) -> common_pb2.Role.ValueType:
    return _ROLE_TO_PROTO[role]


def role_from_proto(value: int) -> Role:
    role = _ROLE_FROM_PROTO.get(value)  # type: ignore[call-overload]  # an open enum: any int
    if role is None:
        raise InvalidRequestError(f"role {value} is not that of a worker")
    return Role(role)


def target_to_proto(target: PrefillTarget) -> worker_pb2.PrefillTarget:
    return worker_pb2.PrefillTarget(
        worker_id=target.worker_id, worker_epoch=target.worker_epoch, address=target.address
    )


def target_from_proto(target: worker_pb2.PrefillTarget) -> PrefillTarget:
    host, colon, port = target.address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        raise InvalidRequestError(
            f"address {target.address[:MAX_NAME]!r} of prefill worker "
            f"{target.worker_id[:MAX_NAME]!r} is wrong; expected host:port"
        )
    return PrefillTarget(
        worker_id=name("worker_id", target.worker_id),
        worker_epoch=target.worker_epoch,
        address=target.address,
    )


def hex_id(field: str, value: str) -> str:
    """Check a link or handoff id: 32 lower-case hex digits."""
    if not _ID.fullmatch(value):
        raise InvalidRequestError(f"{field} is {value[:64]!r}; expected 32 hex digits")
    return value


def name(field: str, value: str) -> str:
    """Check a name: not empty, and short enough to log."""
    if not 0 < len(value) <= MAX_NAME:
        raise InvalidRequestError(f"{field} has {len(value)} characters; expected 1 to {MAX_NAME}")
    return value


def short(field: str, value: str) -> str:
    """Check a word that may be empty."""
    if len(value) > MAX_NAME:
        raise InvalidRequestError(
            f"{field} has {len(value)} characters; expected at most {MAX_NAME}"
        )
    return value


def finite(field: str, value: float) -> float:
    if not math.isfinite(value):
        raise InvalidRequestError(f"{field} is {value}; expected a finite number")
    return value


def non_negative(field: str, value: float) -> float:
    if not math.isfinite(value) or value < 0:
        raise InvalidRequestError(f"{field} is {value}; expected a finite number, not negative")
    return value
