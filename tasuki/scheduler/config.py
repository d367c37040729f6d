"""What an operator may choose about scheduling."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class StepOrder(StrEnum):
    """What a step's token budget goes to first."""

    DECODE_FIRST = "decode_first"  # running requests, then waiting ones: smooth streams
    PREFILL_FIRST = "prefill_first"  # prompts, then single tokens: early first tokens


class Admission(StrEnum):
    """What must be free before a waiting request runs."""

    OPTIMISTIC = "optimistic"  # blocks for its next tokens; it grows, and may be preempted
    RESERVE_MAX = "reserve_max"  # blocks for prompt and max_tokens: nothing is ever preempted


class Batching(StrEnum):
    """When waiting requests may join the running batch."""

    CONTINUOUS = "continuous"  # in any step
    STATIC = "static"  # once the whole batch has ended
    DYNAMIC = "dynamic"  # likewise, and then not before a window has passed or the batch is full


class QueueOrder(StrEnum):
    """In which order waiting requests are admitted."""

    FCFS = "fcfs"
    PRIORITY = "priority"  # the lower number first, and the longer it waits the lower it counts


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    max_model_len: int = 2048
    long_prefill_token_threshold: int = 0  # most tokens of one prompt in one step; 0: no limit
    step_order: StepOrder = StepOrder.DECODE_FIRST
    admission: Admission = Admission.OPTIMISTIC
    batching: Batching = Batching.CONTINUOUS
    batch_window: float = 0.05  # seconds a dynamic batch waits for company
    queue_order: QueueOrder = QueueOrder.FCFS
    # Seconds of waiting that weigh as much as one level of priority. With it the order of two
    # requests never changes, and nobody is overtaken by those who come later than this times the
    # levels between them.
    priority_ageing: float = 10.0
    # How many requests may be admitted past one that does not fit. 0: the head of the line blocks.
    max_bypasses: int = 0
    allocate_whole_prompt: bool = False  # at admission: such a request is never preempted

    def __post_init__(self) -> None:
        for name, least in (
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("max_model_len", 1),
            ("long_prefill_token_threshold", 0),
            ("max_bypasses", 0),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(
                    f"{name} is {value!r}; expected a whole number of at least {least}"
                )
        if not 0 <= self.batch_window < float("inf"):
            raise ValueError(f"batch_window is {self.batch_window!r}; expected seconds")
        if not 0 < self.priority_ageing < float("inf"):
            raise ValueError(
                f"priority_ageing is {self.priority_ageing!r}; expected seconds above 0"
            )
        for name, kind in (
            ("step_order", StepOrder),
            ("admission", Admission),
            ("batching", Batching),
            ("queue_order", QueueOrder),
        ):
            object.__setattr__(self, name, kind(getattr(self, name)))

    @property
    def max_running(self) -> int:
        """Most requests that run: each of them must get a token in every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)
