"""The prefill side of one attempt to hand a prompt's KV over, as a pure state machine.

Counts what was offered, announced and received, and says when to commit, when the blocks may be
freed and when to stop waiting for the peer. Knows no tensors, streams, threads or physical blocks.

    DISPATCHED -first announce-> TRANSFERRING -everything announced, Commit sent-> COMMITTED
    any state before COMMITTED -abandon-> ABANDONED

It begins as DISPATCHED: the prompt was accepted. An end does not free the blocks: what was
announced is still being read until the peer has it (`drained`) or the link is fenced.
"""

from __future__ import annotations

import math

from tasuki.errors import TransferError
from tasuki.reasons import AbandonReason
from tasuki.transfer.handoff import HandoffState


class OutgoingHandoff:
    """Blocks are offered in logical order from `first_block` on, so counts are enough.

    Events that the owner causes return True when they changed something, False when they came too
    late (`stale`). `deadline` is the request's own; `progress_timeout` is for the peer.
    """

    def __init__(
        self,
        handoff_id: str,
        first_block: int,
        num_blocks: int,
        *,
        now: float,
        progress_timeout: float,
        deadline: float = math.inf,
    ) -> None:
        if first_block < 0 or num_blocks < 0:
            raise ValueError(f"blocks {first_block}..+{num_blocks} are no range")
        self.handoff_id = handoff_id
        self.first_block = first_block
        self.num_blocks = num_blocks
        self.state = HandoffState.DISPATCHED
        self.abandon_reason: AbandonReason | None = None
        self.offered = 0
        self.announced = 0
        self.received = 0
        self.tokens: int | None = None  # set once nothing more will be offered
        self.stale = 0  # events that came after the end
        self.ended_at: float | None = None
        self._progress_timeout = progress_timeout
        self._own_deadline = deadline
        self._progressed_at = now

    @property
    def ready_to_commit(self) -> bool:
        """Everything is offered and announced, and Commit was not sent yet."""
        complete = self.tokens is not None and self.announced == self.num_blocks
        return complete and not self.is_over

    @property
    def is_committed(self) -> bool:
        """Commit was sent."""
        return self.state is HandoffState.COMMITTED

    @property
    def is_over(self) -> bool:
        return self.state in (HandoffState.COMMITTED, HandoffState.ABANDONED)

    @property
    def outstanding(self) -> int:
        """Blocks announced and not received: their memory is still being read."""
        return self.announced - self.received

    @property
    def drained(self) -> bool:
        """Nothing will be announced any more and nothing announced remains: free the blocks."""
        return self.is_over and self.outstanding == 0

    @property
    def peer_deadline(self) -> float:
        """When to give the peer up, and the link with it: infinite while nothing is owed to it.

        Only the fence of the link ends a wait for the peer, so this one outlives the end.
        """
        return self._progressed_at + self._progress_timeout if self.outstanding else math.inf

    @property
    def awaited(self) -> str:
        """What the peer owes and for how long it may, as words for a message."""
        blocks = "block" if self.outstanding == 1 else "blocks"
        return (
            f"{self.outstanding} announced {blocks} of handoff {self.handoff_id} "
            f"within {self._progress_timeout} s"
        )

    @property
    def deadline(self) -> float:
        """When to give up unless something happens before: infinite once nothing is awaited.

        While the prompt is computed that is the request's own; its call ends it if it has none.
        """
        return min(self.peer_deadline, math.inf if self.is_over else self._own_deadline)

    def expired(self, now: float) -> bool:
        return now >= self.deadline

    def stalled(self, now: float) -> bool:
        """The peer owes a Received for too long. Nothing but a fence frees the blocks now."""
        return now >= self.peer_deadline

    def offer(self, first_block: int, count: int) -> bool:
        """`count` more blocks are complete and will never be written again."""
        if self._is_late():
            return False
        expected = self.first_block + self.offered
        room = self.num_blocks - self.offered
        if self.tokens is not None or first_block != expected or not 1 <= count <= room:
            raise TransferError(
                f"handoff {self.handoff_id}: blocks {first_block}..+{count} were offered, but the "
                f"next may be {expected} and {room} are left"
                + (", and it was committed already" if self.tokens is not None else "")
            )
        self.offered += count
        return True

    def announce(self, count: int, now: float) -> None:
        """`count` offered blocks are on their way. The caller never announces after the end."""
        assert not self.is_over
        assert 1 <= count <= self.offered - self.announced
        self.announced += count
        self.state = HandoffState.TRANSFERRING
        self._progressed_at = now

    def progress(self, now: float) -> None:
        """The peer received something of this link: first in, first out, so ours came nearer."""
        self._progressed_at = now

    def receive(self, count: int, now: float) -> None:
        """The peer has `count` announced blocks. Comes after the end as well: a debt is paid."""
        assert 1 <= count <= self.outstanding
        self.received += count
        self._progressed_at = now

    def commit(self, tokens: int) -> bool:
        """Nothing more will be offered; `tokens` prompt positions are handed over."""
        if self._is_late():
            return False
        if self.tokens is not None or self.offered != self.num_blocks or tokens < 1:
            raise TransferError(
                f"handoff {self.handoff_id}: commit of {tokens} tokens after {self.offered} of "
                f"{self.num_blocks} blocks were offered"
                + (", and it was committed already" if self.tokens is not None else "")
            )
        self.tokens = tokens
        return True

    def finish_commit(self, now: float) -> None:
        """Commit is on its way."""
        assert self.ready_to_commit
        self.state = HandoffState.COMMITTED
        self.ended_at = now

    def abandon(self, reason: AbandonReason, now: float) -> bool:
        """Give up: what is not announced never will be. A sent Commit cannot be taken back."""
        if self._is_late():
            return False
        self.state = HandoffState.ABANDONED
        self.abandon_reason = reason
        self.ended_at = now
        return True

    def check_integrity(self) -> None:
        assert 0 <= self.received <= self.announced <= self.offered <= self.num_blocks
        assert (self.abandon_reason is not None) == (self.state is HandoffState.ABANDONED)
        assert (self.ended_at is not None) == self.is_over
        if self.is_committed:
            assert self.tokens is not None
            assert self.announced == self.num_blocks
        if not self.is_over:
            assert (self.state is HandoffState.TRANSFERRING) == (self.announced > 0)

    def _is_late(self) -> bool:
        self.stale += self.is_over
        return self.is_over
