"""The decode side of one attempt to hand a prompt's KV over, as a pure state machine.

Takes events with the time at which they were seen and answers what they changed. Knows no tensors,
streams, threads or physical blocks: block numbers are logical, counted within the prompt.

    RESERVED -dispatch-> DISPATCHED -announce-> TRANSFERRING -commit and every block-> COMMITTED
    any state before COMMITTED -abandon-> ABANDONED
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from tasuki.errors import TransferError
from tasuki.reasons import AbandonReason


class HandoffState(StrEnum):
    RESERVED = "reserved"  # blocks are promised, nobody was asked yet
    DISPATCHED = "dispatched"  # a prefill worker was asked
    TRANSFERRING = "transferring"  # at least one segment was announced
    COMMITTED = "committed"  # Commit was seen and every needed block was received
    ABANDONED = "abandoned"


@dataclass(frozen=True)
class TransferTimings:
    """Durations in seconds, never negative; zero where the handoff did not get that far."""

    transfer: float  # first Announce seen -> committed
    exposed_transfer: float  # first token seen -> last segment received, if later
    commit_wait: float  # last segment received (or first token, if later) -> committed


class Handoff:
    """Every event returns True when it changed something, False when it came too late (`stale`).

    Events that break the protocol raise TransferError; whoever passes them on closes the link.
    `num_blocks` counts the blocks of the prompt that are needed from `first_block` on; the block of
    the first generated token is not among them.
    """

    def __init__(
        self,
        handoff_id: str,
        request_id: str,
        link_id: str,
        first_block: int,
        num_blocks: int,
        *,
        now: float,
        progress_timeout: float,
        reserve_timeout: float,
    ) -> None:
        if first_block < 0 or num_blocks < 0:
            raise ValueError(f"blocks {first_block}..+{num_blocks} are no range")
        self.handoff_id = handoff_id
        self.request_id = request_id
        self.link_id = link_id
        self.first_block = first_block
        self.num_blocks = num_blocks
        self.state = HandoffState.RESERVED
        self.abandon_reason: AbandonReason | None = None
        self.stale = 0  # events that came after the end
        self.tokens: int | None = None  # prompt positions, as the Commit gave them
        self.reserved_at = now
        self.dispatched_at: float | None = None
        self.accepted_at: float | None = None
        self.first_announce: float | None = None
        self.last_received: float | None = None
        self.first_token_at: float | None = None
        self.committed_at: float | None = None
        self._progress_timeout = progress_timeout
        self._deadline = now + reserve_timeout
        self._announced: set[int] = set()
        self._received: set[int] = set()
        self._run = 0

    @property
    def is_committed(self) -> bool:
        return self.state is HandoffState.COMMITTED

    @property
    def is_over(self) -> bool:
        return self.state in (HandoffState.COMMITTED, HandoffState.ABANDONED)

    @property
    def received_run(self) -> int:
        """Blocks received without a gap from `first_block` on: what a fallback may keep."""
        return self._run

    @property
    def received_blocks(self) -> int:
        return len(self._received)

    @property
    def posted(self) -> frozenset[int]:
        """Logical blocks announced and not received: somebody may be writing them."""
        return frozenset(self._announced - self._received)

    @property
    def deadline(self) -> float:
        """When to give up unless something happens before: infinite once nothing more is awaited.

        A committed handoff still awaits its first token, which travels on another stream.
        """
        waits_for_token = self.is_committed and self.first_token_at is None
        return math.inf if self.is_over and not waits_for_token else self._deadline

    def expired(self, now: float) -> bool:
        return now >= self.deadline

    def dispatch(self, now: float) -> bool:
        """A prefill worker is being asked."""
        if self._is_late():
            return False
        if self.state is not HandoffState.RESERVED:
            raise TransferError(f"handoff {self.handoff_id} was dispatched twice")
        self.state = HandoffState.DISPATCHED
        self.dispatched_at = now
        self._touch(now)
        return True

    def accept(self, now: float) -> bool:
        """The prefill worker took it. May be seen after its first Announce: two streams."""
        if self._is_late():
            return False
        self._require_dispatched("Accepted")
        self.accepted_at = now
        self._touch(now)
        return True

    def progress(self, now: float) -> bool:
        """The prefill worker computed some of the prompt."""
        if self._is_late():
            return False
        self._require_dispatched("Progress")
        self._touch(now)
        return True

    def announce(self, first_block: int, count: int, now: float) -> bool:
        """A segment of `count` blocks will follow. Raises TransferError if it may not."""
        if self._is_late():
            return False
        self._require_dispatched("Announce")
        if self.tokens is not None:
            raise TransferError(f"handoff {self.handoff_id}: an Announce came after the Commit")
        blocks = self._range(first_block, count)
        if not self._announced.isdisjoint(blocks):
            raise TransferError(
                f"handoff {self.handoff_id}: blocks {first_block}..+{count} were announced before"
            )
        self._announced.update(blocks)
        self.state = HandoffState.TRANSFERRING
        if self.first_announce is None:
            self.first_announce = now
        self._touch(now)
        return True

    def receive(self, first_block: int, count: int, now: float) -> bool:
        """An announced segment is here, complete, and matches its digest where digests are on."""
        if self._is_late():
            return False
        blocks = self._range(first_block, count)
        if not self._announced.issuperset(blocks) or not self._received.isdisjoint(blocks):
            raise TransferError(
                f"handoff {self.handoff_id}: blocks {first_block}..+{count} were received, but not "
                "announced before, or received twice"
            )
        self._received.update(blocks)
        while self._run < self.num_blocks and self.first_block + self._run in self._received:
            self._run += 1
        self.last_received = now
        self._touch(now)
        self._finish_commit(now)
        return True

    def commit(self, tokens: int, blocks: int, now: float) -> bool:
        """Nothing more will be announced: `tokens` prompt positions, `blocks` blocks announced."""
        if self._is_late():
            return False
        self._require_dispatched("Commit")
        if self.tokens is not None:
            raise TransferError(f"handoff {self.handoff_id} was committed twice")
        if blocks != len(self._announced) or blocks != self.num_blocks:
            raise TransferError(
                f"handoff {self.handoff_id}: Commit says {blocks} blocks, {len(self._announced)} "
                f"were announced and {self.num_blocks} are needed"
            )
        if tokens < 1:
            raise TransferError(f"handoff {self.handoff_id}: Commit says {tokens} tokens")
        self.tokens = tokens
        self._touch(now)
        self._finish_commit(now)
        return True

    def first_token(self, now: float) -> bool:
        """The first token was seen. May be seen after the commit: two streams have no order."""
        if self.state is HandoffState.ABANDONED or self.first_token_at is not None:
            self.stale += 1
            return False
        self._require_dispatched("FirstToken")
        self.first_token_at = now
        self._touch(now)
        return True

    def abandon(self, reason: AbandonReason, now: float) -> bool:
        """Give up. A committed handoff cannot be abandoned any more."""
        if self._is_late():
            return False
        self.state = HandoffState.ABANDONED
        self.abandon_reason = reason
        self._touch(now)
        return True

    def durations(self, now: float) -> dict[HandoffState, float]:
        """Seconds in each state it was in before its end, or, if it goes on, before `now`."""
        end = now if self.committed_at is None else self.committed_at
        entered = {
            HandoffState.RESERVED: self.reserved_at,
            HandoffState.DISPATCHED: self.dispatched_at,
            HandoffState.TRANSFERRING: self.first_announce,
        }
        begins = [(state, at) for state, at in entered.items() if at is not None]
        ends = [at for _, at in begins[1:]] + [end]
        return {state: to - at for (state, at), to in zip(begins, ends, strict=True)}

    def timings(self) -> TransferTimings:
        """How the time went; meant for a committed handoff."""
        committed, received = self.committed_at, self.last_received
        if committed is None:
            return TransferTimings(0.0, 0.0, 0.0)
        token = self.first_token_at
        start = committed if self.first_announce is None else self.first_announce
        exposed = 0.0 if received is None or token is None else max(0.0, received - token)
        ready = max((t for t in (received, token) if t is not None), default=committed)
        return TransferTimings(committed - start, exposed, max(0.0, committed - ready))

    def check_integrity(self) -> None:
        needed = range(self.first_block, self.first_block + self.num_blocks)
        assert self._received <= self._announced <= set(needed)
        assert all(block in self._received for block in needed[: self._run])
        assert self._run == self.num_blocks or needed[self._run] not in self._received
        assert (self.abandon_reason is not None) == (self.state is HandoffState.ABANDONED)
        assert (self.committed_at is not None) == self.is_committed
        if self.is_committed:
            assert self.tokens is not None
            assert self._run == self.num_blocks
        if self.state in (HandoffState.RESERVED, HandoffState.DISPATCHED):
            assert not self._announced

    def _is_late(self) -> bool:
        self.stale += self.is_over
        return self.is_over

    def _touch(self, now: float) -> None:
        self._deadline = now + self._progress_timeout

    def _require_dispatched(self, event: str) -> None:
        if self.state is HandoffState.RESERVED:
            raise TransferError(f"handoff {self.handoff_id}: {event} came before the dispatch")

    def _range(self, first_block: int, count: int) -> range:
        end = self.first_block + self.num_blocks
        if count < 1 or first_block < self.first_block or first_block + count > end:
            raise TransferError(
                f"handoff {self.handoff_id}: blocks {first_block}..+{count} are outside the needed "
                f"{self.first_block}..+{self.num_blocks}"
            )
        return range(first_block, first_block + count)

    def _finish_commit(self, now: float) -> None:
        if self.tokens is not None and self._run == self.num_blocks:
            self.state = HandoffState.COMMITTED
            self.committed_at = now
