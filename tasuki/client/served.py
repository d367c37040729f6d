"""What a cluster says about itself: the model it serves, and the process that answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tasuki.v1 import common_pb2, inference_pb2


@dataclass(frozen=True)
class ServedModel:
    """The model of a cluster."""

    model: str
    max_model_len: int  # most tokens of prompt and output together
    vocab_size: int
    has_chat_template: bool
    setup: str  # "split" or "colocated"


@dataclass(frozen=True)
class ServerDescription:
    """One process: what it is, and with which settings it runs."""

    role: str  # "router", "prefill" or "decode"
    worker_id: str  # empty for a router
    worker_epoch: int  # 0 for a router
    version: str
    pid: int
    engine_pid: int  # 0 for a router
    metrics_address: str
    config: Mapping[str, str]
    facts: Mapping[str, str]


def model_from_proto(response: inference_pb2.GetModelInfoResponse) -> ServedModel:
    return ServedModel(
        model=response.model,
        max_model_len=response.max_model_len,
        vocab_size=response.vocab_size,
        has_chat_template=response.has_chat_template,
        setup=response.setup,
    )


def server_from_proto(response: common_pb2.GetServerInfoResponse) -> ServerDescription:
    return ServerDescription(
        role=_role(response.role),
        worker_id=response.worker_id,
        worker_epoch=response.worker_epoch,
        version=response.version,
        pid=response.pid,
        engine_pid=response.engine_pid,
        metrics_address=response.metrics_address,
        config=dict(response.config),
        facts=dict(response.facts),
    )


def _role(value: common_pb2.Role.ValueType) -> str:
    try:
        return common_pb2.Role.Name(value).removeprefix("ROLE_").lower()
    except ValueError:
        return "unknown"
