"""What a worker says about itself."""

from __future__ import annotations

from tasuki.messages.base import ErrorStatus, Message, Role
from tasuki.messages.link import LayoutDescription


class EngineReady(Message, frozen=True):
    """Sent once, when the engine has loaded and warmed up."""

    worker_epoch: int
    engine_pid: int
    layout: LayoutDescription
    num_blocks: int
    block_bytes: int
    max_model_len: int
    vocab_size: int
    facts: dict[str, str]  # what was chosen at start: linears, attention, threads, memory


class EngineFailed(Message, frozen=True):
    """Sent instead of EngineReady when the engine cannot start, and before a deliberate exit."""

    error: ErrorStatus


class LinkReport(Message, frozen=True):
    worker_id: str
    worker_epoch: int
    state: str  # opening | open | failed


class LoadReport(Message, frozen=True):
    """A worker's state, a few times a second."""

    worker_id: str
    worker_epoch: int
    role: Role
    ready: bool
    draining: bool
    free_blocks: int
    total_blocks: int
    queued_tokens: int  # prompt tokens accepted and not yet computed
    running: int
    waiting: int
    prefill_tokens_per_second: float  # measured, 0 before the first measurement
    links: list[LinkReport]


class MetricSample(Message, frozen=True):
    """One change of one metric, recorded in the engine and applied in the server process."""

    name: str  # without the `tasuki_` prefix
    op: str  # "inc" | "set" | "observe"
    value: float
    labels: dict[str, str]
