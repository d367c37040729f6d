"""The KV blocks of one cache: free list, reference counts, names of reusable contents. Knows no
requests.

Every block is in exactly one state; the counts always add up to the total. Fresh blocks are handed
out lowest id first, so that a request gets runs of adjacent blocks, which travel as one message.
A block that was named (`publish`) keeps its content when its last holder lets go, until the room is
needed: the one that was let go longest ago is evicted first (LRU).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from enum import StrEnum


class BlockState(StrEnum):
    FREE = "free"
    CACHED = "cached"  # held by nobody, but its content has a name and can be shared again
    IN_USE = "in_use"
    RESERVED = "reserved"  # promised to a handoff
    QUARANTINED = "quarantined"  # nobody's, but a transfer may still write into it


HELD = (BlockState.IN_USE, BlockState.RESERVED, BlockState.QUARANTINED)


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.evictions = 0
        self._states = [BlockState.FREE] * num_blocks
        self._holders = [0] * num_blocks
        self._free = list(range(num_blocks))  # a heap: sorted is one
        self._cached: OrderedDict[int, None] = OrderedDict()  # the next to be evicted first
        self._name_of: dict[int, bytes] = {}
        self._by_name: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: free ones, and cached ones, which give way."""
        return len(self._free) + len(self._cached)

    def counts(self) -> dict[BlockState, int]:
        """How many blocks are in each state; they add up to `num_blocks`."""
        counts = {
            BlockState.FREE: len(self._free),
            BlockState.CACHED: len(self._cached),
            BlockState.RESERVED: self._states.count(BlockState.RESERVED),
            BlockState.QUARANTINED: self._states.count(BlockState.QUARANTINED),
        }
        return counts | {BlockState.IN_USE: self.num_blocks - sum(counts.values())}

    def state(self, block_id: int) -> BlockState:
        return self._states[block_id]

    def holders(self, block_id: int) -> int:
        """How often it was allocated or shared, and not freed since."""
        return self._holders[block_id]

    # --- holding and letting go -----------------------------------------------------------------

    def allocate(self, count: int, state: BlockState = BlockState.IN_USE) -> list[int] | None:
        """Take `count` blocks with no content worth keeping into `state`, each with one holder;
        None, and nothing taken, when fewer are to be had.
        """
        assert state in (BlockState.IN_USE, BlockState.RESERVED)
        if count > len(self._free) and count > self.num_free:
            return None
        block_ids = []
        for _ in range(count):
            block_id = heapq.heappop(self._free) if self._free else self._evict()
            self._states[block_id] = state
            self._holders[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        del self._by_name[self._name_of.pop(block_id)]
        self.evictions += 1
        return block_id

    def share(self, block_id: int) -> None:
        """Become one more holder of a block with content: one in use, or a cached one."""
        state = self._states[block_id]
        assert state in (BlockState.CACHED, BlockState.IN_USE), state
        if state is BlockState.CACHED:
            del self._cached[block_id]
            self._states[block_id] = BlockState.IN_USE
        self._holders[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """One holder of each lets go. What nobody holds is cached if it has a name, else free.

        Blocks given first are evicted first. Freeing what nobody holds is a bug.
        """
        for block_id in block_ids:
            left = self._holders[block_id] - 1
            assert left >= 0, f"block {block_id} freed twice"
            self._holders[block_id] = left
            if left:
                continue
            if block_id in self._name_of:
                self._states[block_id] = BlockState.CACHED
                self._cached[block_id] = None
            else:
                self._states[block_id] = BlockState.FREE
                heapq.heappush(self._free, block_id)

    def mark(self, block_ids: Iterable[int], state: BlockState) -> None:
        """Move held blocks to another held state."""
        assert state in HELD
        for block_id in block_ids:
            assert self._holders[block_id]
            if state is BlockState.QUARANTINED:  # its content is about to change
                assert self._holders[block_id] == 1
                assert block_id not in self._name_of
            self._states[block_id] = state

    # --- names of contents ------------------------------------------------------------------------

    def publish(self, block_id: int, name: bytes) -> None:
        """Give the content of a held, complete block a name by which `find` finds it.

        A second block of the same content stays unnamed: one is enough.
        """
        assert self._states[block_id] is BlockState.IN_USE
        if name in self._by_name or block_id in self._name_of:
            return
        self._name_of[block_id] = name
        self._by_name[name] = block_id

    def find(self, name: bytes) -> int | None:
        """The block whose content has this name."""
        return self._by_name.get(name)

    def is_cached(self, block_id: int) -> bool:
        """Whether only its name keeps it: sharing it takes it from what can be allocated."""
        return self._holders[block_id] == 0 and block_id in self._name_of

    def forget_names(self) -> int:
        """Forget all names; cached blocks become free. Returns how many names there were."""
        count = len(self._name_of)
        for block_id in self._cached:
            self._states[block_id] = BlockState.FREE
            heapq.heappush(self._free, block_id)
        self._cached.clear()
        self._name_of.clear()
        self._by_name.clear()
        return count

    def check_integrity(self) -> None:
        """Assert that free list, states, holders and names tell the same story."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached
        for block_id, state in enumerate(self._states):
            assert (state is BlockState.FREE) == (block_id in free), block_id
            assert (state is BlockState.CACHED) == (block_id in cached), block_id
            assert (state in HELD) == (self._holders[block_id] > 0), block_id
        assert cached <= self._name_of.keys()
        assert not free & self._name_of.keys()
        assert {name: block for block, name in self._name_of.items()} == self._by_name
