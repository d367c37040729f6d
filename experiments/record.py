"""What is written down about each request of a run: every report is computed from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    """Times are seconds on the load generator's clock, from the start of the run."""

    index: int
    prompt_tokens: int
    scheduled: float
    sent: float
    first: float | None  # first token at the client
    last: float | None
    tokens: int
    outcome: str  # "completed", or the status code of the error
    placement: str = ""  # "split" or "local"
    reason: str = ""
    fallback: str = ""
    transfer: float = 0.0  # seconds, on the decode worker's clock
    transfer_bytes: int = 0

    @property
    def ttft(self) -> float | None:
        """From the *scheduled* arrival, so that a late generator cannot flatter the server."""
        return None if self.first is None else self.first - self.scheduled

    @property
    def tpot(self) -> float:
        """0 for one token: nothing to wait for."""
        if self.first is None or self.last is None or self.tokens < 2:
            return 0.0
        return (self.last - self.first) / (self.tokens - 1)

    @property
    def completed(self) -> bool:
        return self.outcome == "completed"
