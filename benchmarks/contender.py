"""What an engine benchmark asks of each side: compute a prompt, and go on with some for a while."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Prompt = Sequence[int]


@dataclass(frozen=True)
class Prefilled:
    seconds: float
    token_id: int  # greedy; both sides must say the same


class Contender(Protocol):
    def prefill(self, prompt: Prompt) -> Prefilled:
        """From a prompt, with nothing else running, to its first token."""

    def start(self, prompts: Sequence[Prompt], tokens: int) -> None:
        """Compute the prompts and get ready for at most `tokens` decode steps of all together."""

    def decode(self, steps: int) -> float:
        """Seconds per step over `steps` steps, each giving every started prompt one token."""

    def stop(self) -> list[list[int]]:
        """Forget what was started. Returns the tokens of each prompt, the first one included."""
