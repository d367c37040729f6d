"""One worker as placement sees it: its latest load report, with the router's own charges added.

Plain data and arithmetic on it; knows nothing about streams.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasuki.messages import PrefillTarget, Role


@dataclass(frozen=True, kw_only=True)
class WorkerSnapshot:
    """Counts are those of the report; `charged_*` are placements the report does not show yet."""

    address: str  # where the router reaches it; the key of the registry
    worker_id: str
    worker_epoch: int
    role: Role
    live: bool = True  # its Watch stream is open and its reports are fresh
    ready: bool = True
    draining: bool = False
    free_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 16
    max_model_len: int = 0
    reported_tokens: int = 0  # prompt tokens accepted and not computed
    running: int = 0
    waiting: int = 0
    prefill_speed: float = 0.0  # prompt tokens per second; 0: not measured yet
    open_links: frozenset[tuple[str, int]] = frozenset()  # identities of prefill workers
    reports: int = 0  # how many this worker has given
    charged_blocks: int = 0
    charged_requests: int = 0
    charged_tokens: int = 0
    credited_tokens: int = 0  # in the report, but known to be computed since
    outstanding: int = 0  # requests of this router that are there now, reported or not

    @property
    def usable(self) -> bool:
        return self.live and self.ready and not self.draining

    @property
    def identity(self) -> tuple[str, int]:
        return (self.worker_id, self.worker_epoch)

    @property
    def target(self) -> PrefillTarget:
        return PrefillTarget(
            worker_id=self.worker_id, worker_epoch=self.worker_epoch, address=self.address
        )

    @property
    def unclaimed_blocks(self) -> int:
        """Free blocks that no placement of this router will take; may be negative."""
        return self.free_blocks - self.charged_blocks

    @property
    def load(self) -> int:
        """Requests there. A report may leave out those that wait for a handoff; we know ours."""
        return max(self.running + self.waiting + self.charged_requests, self.outstanding)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens to compute there before one placed now."""
        return max(self.reported_tokens - self.credited_tokens, 0) + self.charged_tokens

    @property
    def max_tokens_per_request(self) -> int:
        """Most tokens of prompt and output together that one request can have there."""
        return min(self.max_model_len, self.total_blocks * self.block_size)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
