"""The prefill side of one attempt to hand a prompt's KV over, as a pure state machine.

Counts what was offered, announced and received, and says when to commit and when the blocks may be
freed. Knows no tensors, streams, threads, time or physical blocks.
"""

from __future__ import annotations

from tasuki.errors import TransferError


class OutgoingHandoff:
    """Blocks are offered in logical order from `first_block` on, so counts are enough.

    Events return True when they changed something, False when they came too late (`stale`).
    """

    def __init__(self, handoff_id: str, first_block: int, num_blocks: int) -> None:
        if first_block < 0 or num_blocks < 0:
            raise ValueError(f"blocks {first_block}..+{num_blocks} are no range")
        self.handoff_id = handoff_id
        self.first_block = first_block
        self.num_blocks = num_blocks
        self.offered = 0
        self.announced = 0
        self.received = 0
        self.tokens: int | None = None  # set once nothing more will be offered
        self.committed = False  # Commit was sent
        self.abandoned = False
        self.stale = 0

    @property
    def ready_to_commit(self) -> bool:
        """Everything is offered and announced, and Commit was not sent yet."""
        complete = self.tokens is not None and self.announced == self.num_blocks
        return complete and not self.is_over

    @property
    def is_over(self) -> bool:
        return self.committed or self.abandoned

    @property
    def outstanding(self) -> int:
        """Blocks announced and not received: their memory is still being read."""
        return self.announced - self.received

    @property
    def drained(self) -> bool:
        """Nothing will be announced any more and nothing announced remains: free the blocks."""
        return self.is_over and self.outstanding == 0

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

    def announce(self, count: int) -> None:
        """`count` offered blocks are on their way. The caller never announces after the end."""
        assert not self.is_over
        assert 1 <= count <= self.offered - self.announced
        self.announced += count

    def receive(self, count: int) -> None:
        """The peer has `count` announced blocks. Comes after the end as well: a debt is paid."""
        assert 1 <= count <= self.outstanding
        self.received += count

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

    def finish_commit(self) -> None:
        """Commit is on its way."""
        assert self.ready_to_commit
        self.committed = True

    def abandon(self) -> bool:
        """Give up: what is not announced never will be."""
        if self._is_late():
            return False
        self.abandoned = True
        return True

    def check_integrity(self) -> None:
        assert 0 <= self.received <= self.announced <= self.offered <= self.num_blocks
        assert not (self.committed and self.abandoned)
        if self.committed:
            assert self.tokens is not None
            assert self.announced == self.num_blocks

    def _is_late(self) -> bool:
        self.stale += self.is_over
        return self.is_over
