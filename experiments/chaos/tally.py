"""What a chaos run amounts to: every request compared with the undisturbed run. Pure counting."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from experiments.chaos.schedule import FaultKind

STATES = ("reserved", "dispatched", "transferring", "committed", "abandoned")


@dataclass
class Answer:
    """What came back for one request, as it came."""

    samples: list[list[int]]
    repeated: int = 0  # tokens whose index was there already
    skipped: int = 0  # tokens whose index was passed over
    stall: float = 0.0  # longest wait for the next output, the first one included; seconds
    error: str = ""  # what it ended with instead of an end
    cancelled: bool = False  # by us

    def take(self, sample: int, index: int, token_ids: tuple[int, ...]) -> None:
        """Tokens of one message."""
        have = self.samples[sample]
        if index < len(have):
            self.repeated += len(have) - index
        self.skipped += max(0, index - len(have))
        have += token_ids


@dataclass
class Tally:
    """Sums over a run. A request counts once as completed, lost or cancelled."""

    requests: int = 0
    completed: int = 0
    cancelled: int = 0
    lost: int = 0
    duplicated: int = 0
    changed: int = 0
    leaked: int = 0  # blocks that nobody holds, and that are not free, when all is quiet
    migrated: int = 0
    fell_back: int = 0
    refused: int = 0  # times that one was sent again because no worker could take it then
    worst_stall_seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    def count(self, answer: Answer, expected: list[list[int]]) -> None:
        self.requests += 1
        self.duplicated += bool(answer.repeated)
        if answer.cancelled:
            self.cancelled += 1
            wrong = any(
                have != want[: len(have)]
                for have, want in zip(answer.samples, expected, strict=True)
            )
            self.changed += wrong
            return
        self.worst_stall_seconds = max(self.worst_stall_seconds, answer.stall)
        if answer.error or answer.skipped:
            self.lost += 1
            self.errors[answer.error or "tokens were skipped"] += 1
            return
        self.completed += 1
        self.changed += answer.samples != expected

    @property
    def missed(self) -> list[str]:
        """Kinds of fault and states of a handoff that were never hit."""
        return [
            *(kind.value for kind in FaultKind if not self.kinds[kind]),
            *(state for state in STATES if not self.states[state]),
        ]

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.duplicated or self.changed or self.leaked)

    def as_dict(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "completed": self.completed,
            "cancelled": self.cancelled,
            "faults": {
                "by_kind": {kind.value: self.kinds[kind] for kind in FaultKind},
                "by_state": {state: self.states[state] for state in STATES},
            },
            "lost": self.lost,
            "duplicated": self.duplicated,
            "changed": self.changed,
            "leaked": self.leaked,
            "migrated": self.migrated,
            "fell_back": self.fell_back,
            "refused": self.refused,
            "worst_stall_seconds": round(self.worst_stall_seconds, 3),
            "errors": dict(self.errors),
        }
