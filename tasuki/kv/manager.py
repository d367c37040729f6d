"""Which request holds which blocks. Knows neither tensors nor scheduling policy.

A block table only grows while its request lives, and a request is named by a key that is unique
in its engine (a request id may be seen twice). Blocks a transfer may still write into are
quarantined, not freed, until the link says that it will not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tasuki.kv.block_pool import BlockPool, BlockState
from tasuki.kv.layout import KVLayout


class KVCacheManager:
    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.pool = BlockPool(num_blocks)
        self._tables: dict[int, list[int]] = {}
        self._quarantined: set[int] = set()

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def fits(self, num_tokens: int) -> bool:
        """Whether `num_tokens` positions fit into the whole cache."""
        return self.layout.blocks_for(num_tokens) <= self.pool.num_blocks

    def table(self, key: int) -> Sequence[int]:
        """The physical blocks of a request, in logical order; empty when it holds none."""
        return self._tables.get(key, ())

    def grow(self, key: int, num_tokens: int, headroom: int = 0) -> bool:
        """Make the table cover `num_tokens`, leaving `headroom` blocks free; all or nothing."""
        table = self._tables.get(key, [])
        count = self.layout.blocks_for(num_tokens) - len(table)
        if count <= 0:
            return True
        if count + headroom > self.num_free:
            return False
        fresh = self.pool.allocate(count)
        assert fresh is not None
        self._tables[key] = table + fresh
        return True

    def reserve(self, key: int, num_tokens: int, headroom: int = 0) -> Sequence[int] | None:
        """Promise blocks for `num_tokens` to a handoff; None when they would eat the headroom."""
        assert key not in self._tables
        count = self.layout.blocks_for(num_tokens)
        if count + headroom > self.num_free:
            return None
        blocks = self.pool.allocate(count, BlockState.RESERVED)
        assert blocks is not None
        self._tables[key] = blocks
        return blocks

    def commit(self, key: int) -> None:
        """The handoff succeeded: its reserved blocks are in use."""
        self.pool.mark(self._tables[key], BlockState.IN_USE)

    def abandon(self, key: int, keep: int, in_flight: frozenset[int]) -> None:
        """The handoff failed: keep the first `keep` blocks, and of the rest those that no transfer
        can touch; quarantine those `in_flight` and replace them by fresh ones, as far as there are
        fresh ones: the table ends before the first block that could not be replaced.
        """
        table = self._tables[key]
        kept: list[int] = []
        given_up: list[int] = []
        for logical, block_id in enumerate(table):
            if logical < keep or block_id not in in_flight:
                kept.append(block_id)
                continue
            given_up.append(block_id)
            fresh = self.pool.allocate(1)
            if fresh is None:
                rest = table[logical + 1 :]
                given_up += [block for block in rest if block in in_flight]
                self.pool.free(block for block in rest if block not in in_flight)
                break
            kept += fresh
        self.quarantine(given_up)
        self._tables[key] = kept
        self.pool.mark(kept, BlockState.IN_USE)

    def free(self, key: int, in_flight: frozenset[int] = frozenset()) -> None:
        """The request is over: free its blocks, quarantine those a transfer may still write to."""
        table = self._tables.pop(key, [])
        self.quarantine(block for block in table if block in in_flight)
        self.pool.free(block for block in table if block not in in_flight)

    def quarantine(self, block_ids: Iterable[int]) -> None:
        blocks = list(block_ids)
        self.pool.mark(blocks, BlockState.QUARANTINED)
        self._quarantined.update(blocks)

    def release(self, block_ids: Iterable[int]) -> None:
        """The link promises that nothing will be written into these any more."""
        blocks = self._quarantined.intersection(block_ids)
        self._quarantined -= blocks
        self.pool.free(sorted(blocks))

    def leaked(self, live_keys: Iterable[int]) -> list[int]:
        """Blocks that are held, but by no live request and no quarantine."""
        live = set(live_keys)
        owned = {block for key, table in self._tables.items() if key in live for block in table}
        owned |= self._quarantined
        held = (b for b in range(self.pool.num_blocks) if self.pool.state(b) is not BlockState.FREE)
        return [block for block in held if block not in owned]

    def check_integrity(self) -> None:
        """Assert that no block has two owners and none lacks one."""
        self.pool.check_integrity()
        owned = [block for table in self._tables.values() for block in table]
        owned += self._quarantined
        assert len(owned) == len(set(owned)), "a block has two owners"
        assert not self.leaked(self._tables), "a block has no owner"
        assert all(self.pool.state(b) is BlockState.QUARANTINED for b in self._quarantined)
