"""The free list of KV blocks and the state of each one. Knows no requests.

Every block is in exactly one state; the counts always add up to the total. Lower ids are handed out
first, so that fresh requests get runs of adjacent blocks, which travel as one message.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from enum import StrEnum


class BlockState(StrEnum):
    FREE = "free"
    CACHED = "cached"  # holds a reusable prefix and can be evicted
    IN_USE = "in_use"
    RESERVED = "reserved"  # promised to a handoff
    QUARANTINED = "quarantined"  # nobody's, but a transfer may still write into it


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._states = [BlockState.FREE] * num_blocks
        self._free = list(range(num_blocks))  # a heap: sorted is one
        self._counts = dict.fromkeys(BlockState, 0)
        self._counts[BlockState.FREE] = num_blocks

    @property
    def num_free(self) -> int:
        return self._counts[BlockState.FREE]

    def counts(self) -> dict[BlockState, int]:
        """How many blocks are in each state; they add up to `num_blocks`."""
        return dict(self._counts)

    def state(self, block_id: int) -> BlockState:
        return self._states[block_id]

    def allocate(self, count: int, state: BlockState = BlockState.IN_USE) -> list[int] | None:
        """Take `count` free blocks into `state`, or none at all (None) when fewer are free."""
        assert state in (BlockState.IN_USE, BlockState.RESERVED)
        if count > self.num_free:
            return None
        block_ids = [heapq.heappop(self._free) for _ in range(count)]
        for block_id in block_ids:
            self._move(block_id, state)
        return block_ids

    def free(self, block_ids: Iterable[int]) -> None:
        """Give blocks back, whatever state they are in. Freeing a free block is a bug."""
        for block_id in block_ids:
            assert self._states[block_id] is not BlockState.FREE, f"block {block_id} freed twice"
            self._move(block_id, BlockState.FREE)
            heapq.heappush(self._free, block_id)

    def mark(self, block_ids: Iterable[int], state: BlockState) -> None:
        """Move held blocks to another held state."""
        for block_id in block_ids:
            assert BlockState.FREE not in (state, self._states[block_id])
            self._move(block_id, state)

    def _move(self, block_id: int, state: BlockState) -> None:
        self._counts[self._states[block_id]] -= 1
        self._counts[state] += 1
        self._states[block_id] = state

    def check_integrity(self) -> None:
        """Assert that free list, states and counts tell the same story."""
        for state in BlockState:
            assert self._counts[state] == self._states.count(state), state
        assert sum(self._counts.values()) == self.num_blocks
        assert len(self._free) == len(set(self._free)) == self.num_free
        assert all(self._states[block_id] is BlockState.FREE for block_id in self._free)
