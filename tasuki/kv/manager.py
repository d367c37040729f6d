"""Which request holds which blocks, and which contents can be shared. Knows neither tensors nor
scheduling policy.

A block table only grows while its request lives, and a request is named by its key, unique in its
engine (a request id may be seen twice). A table in use is never changed in place: a plan may refer
to it. Blocks a transfer may still write into are quarantined, not freed, until the link says that
it will not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tasuki.kv import prefix
from tasuki.kv.block_pool import BlockPool, BlockState
from tasuki.kv.layout import KVLayout
from tasuki.request import Request


@dataclass(frozen=True)
class Prefix:
    """The longest cached beginning of a request: blocks to share, positions that need no compute.

    When every known token is cached, the last one is computed all the same, for its logits: the
    block it is written into is not shared but copied (`copies_last`).
    """

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    copies_last: bool = False


NO_PREFIX = Prefix()


@dataclass(frozen=True)
class BlockCopy:
    """`target` must get the content of `source` before the next step's forward."""

    source: int
    target: int


@dataclass
class _Names:
    """Names of a request's full blocks, as far as they were needed, and how many are published."""

    root: bytes
    names: list[bytes] = field(default_factory=list)
    published: int = 0
    shares: bool = True  # False once the cache was reset: what was computed before stays private

    def upto(self, count: int, request: Request, block_size: int) -> list[bytes]:
        """The names of its first `count` blocks."""
        while len(self.names) < count:
            start = len(self.names) * block_size
            parent = self.names[-1] if self.names else self.root
            self.names.append(prefix.extend(parent, request.tokens(start, block_size)))
        return self.names[:count]


class KVCacheManager:
    def __init__(self, layout: KVLayout, num_blocks: int, *, prefix_caching: bool = True) -> None:
        self.layout = layout
        self.pool = BlockPool(num_blocks)
        self.prefix_caching = prefix_caching
        self._block_size = layout.block_size
        self._tables: dict[int, list[int]] = {}
        self._names: dict[int, _Names] = {}
        self._quarantined: set[int] = set()
        self._copies: list[BlockCopy] = []  # whose source is held until it was copied

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def fits(self, num_tokens: int) -> bool:
        """Whether `num_tokens` positions fit into the whole cache."""
        return self.layout.blocks_for(num_tokens) <= self.pool.num_blocks

    def table(self, key: int) -> Sequence[int]:
        """The physical blocks of a request, in logical order; empty when it holds none."""
        return self._tables.get(key, ())

    def covers(self, key: int) -> int:
        """How many positions the request's table covers."""
        return len(self._tables.get(key, ())) * self._block_size

    # --- a request's first blocks -----------------------------------------------------------------

    def match(self, request: Request) -> Prefix:
        """The longest cached beginning of what is known of a request. Holds nothing yet."""
        if not self.prefix_caching or request.skips_prefix_cache:
            return NO_PREFIX
        full = request.num_tokens // self._block_size
        found: list[int] = []
        for name in self._names_of(request).upto(full, request, self._block_size):
            block_id = self.pool.find(name)
            if block_id is None:
                break
            found.append(block_id)
        num_tokens = len(found) * self._block_size
        whole = num_tokens == request.num_tokens
        return Prefix(tuple(found), num_tokens - whole, copies_last=whole)

    def begin(
        self,
        request: Request,
        known: Prefix,
        num_tokens: int,
        *,
        headroom: int = 0,
        state: BlockState = BlockState.IN_USE,
    ) -> bool:
        """Hold the blocks of `known` and fresh ones, in `state`, to cover `num_tokens` positions.

        Leaves `headroom` blocks free; all or nothing. `known` must be fresh: nothing was allocated
        since `match`.
        """
        assert request.key not in self._tables
        shared = known.block_ids[:-1] if known.copies_last else known.block_ids
        count = max(0, self.layout.blocks_for(num_tokens) - len(shared))
        taken = sum(map(self.pool.is_cached, known.block_ids))
        if count + headroom + taken > self.pool.num_free:
            return False
        for block_id in known.block_ids:
            self.pool.share(block_id)
        fresh = self.pool.allocate(count, state)
        assert fresh is not None
        self._tables[request.key] = [*shared, *fresh]
        self._names_of(request).published = len(shared)
        if known.copies_last:
            self._copies.append(BlockCopy(known.block_ids[-1], fresh[0]))
        return True

    def fork(self, parent: Request, child: Request, num_tokens: int, positions: int) -> bool:
        """Give `child`, whose first `num_tokens` tokens are those the parent has computed, the
        blocks of these: full ones are shared, the last partial one is copied. Fresh ones follow,
        to cover `positions`. False, and nothing held, when there are too few.
        """
        assert child.key not in self._tables
        full, tail = divmod(num_tokens, self._block_size)
        table = self._tables[parent.key]
        fresh = self.pool.allocate(self.layout.blocks_for(max(num_tokens, positions)) - full)
        if fresh is None:
            return False
        for block_id in table[:full]:
            self.pool.share(block_id)
        self._tables[child.key] = [*table[:full], *fresh]
        if tail:
            # the parent's own block may be waiting for its content
            pending = {copy.target: copy.source for copy in self._copies}
            self._copy(pending.get(table[full], table[full]), fresh[0])
        return True

    def _copy(self, source: int, target: int) -> None:
        self.pool.share(source)
        self._copies.append(BlockCopy(source, target))

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies that the next step makes before anything else; end them with `copied`."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def copied(self, copies: Iterable[BlockCopy]) -> None:
        """Let go of the sources."""
        self.pool.free(copy.source for copy in copies)

    # --- growing, publishing, ending --------------------------------------------------------------

    def grow(self, key: int, num_tokens: int) -> Sequence[int] | None:
        """Make the table cover `num_tokens` positions. Returns it, or None, with nothing changed,
        when there are no blocks.
        """
        table = self._tables.get(key, [])
        missing = num_tokens - len(table) * self._block_size
        if missing > 0:
            fresh = self.pool.allocate(-(-missing // self._block_size))
            if fresh is None:
                return None
            table = self._tables[key] = table + fresh
        return table

    def publish(self, request: Request) -> None:
        """Let others share the blocks of `request` that are complete now. Costs nothing to call
        where no block has become complete since.
        """
        if not self.prefix_caching:
            return
        names, table = self._names_of(request), self._tables[request.key]
        full = request.num_computed_tokens // self._block_size
        if names.shares and full > names.published:
            fresh = names.upto(full, request, self._block_size)[names.published :]
            for block_id, name in zip(table[names.published : full], fresh, strict=True):
                self.pool.publish(block_id, name)
            names.published = full

    def commit(self, key: int) -> None:
        """The handoff succeeded: its reserved blocks are in use."""
        self.pool.mark(self._tables[key], BlockState.IN_USE)

    def replace(self, key: int, in_flight: frozenset[int]) -> bool:
        """The handoff starts anew: those of its reserved blocks that a transfer may still write
        into are quarantined, and fresh ones take their places. False, and nothing changed, when
        there are too few.
        """
        fresh = self.pool.allocate(len(in_flight), BlockState.RESERVED)
        if fresh is None:
            return False
        table = self._tables[key]
        assert in_flight.issubset(table)
        spare = iter(fresh)
        self._tables[key] = [next(spare) if block in in_flight else block for block in table]
        self.quarantine(in_flight)
        return True

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
        self._tables[key] = []
        self.quarantine(given_up)
        self.pool.mark(kept, BlockState.IN_USE)
        if kept:
            self._tables[key] = kept
        else:
            self.free(key)

    def free(self, key: int, in_flight: frozenset[int] = frozenset()) -> None:
        """The request holds its blocks no longer: free them, and quarantine those that a transfer
        may still write to. The end of a prefix is evicted before its beginning.
        """
        table = self._tables.pop(key, [])
        self._names.pop(key, None)
        self._drop_copies(table)
        self.quarantine(block for block in table if block in in_flight)
        self.pool.free(block for block in reversed(table) if block not in in_flight)

    def _drop_copies(self, table: Sequence[int]) -> None:
        """Copies into these blocks are needed no more, and would harm whoever gets them next."""
        dropped = [copy for copy in self._copies if copy.target in table]
        if dropped:
            self._copies = [copy for copy in self._copies if copy not in dropped]
            self.copied(dropped)

    def quarantine(self, block_ids: Iterable[int]) -> None:
        blocks = list(block_ids)
        self.pool.mark(blocks, BlockState.QUARANTINED)
        self._quarantined.update(blocks)

    def release(self, block_ids: Iterable[int]) -> None:
        """The link promises that nothing will be written into these any more."""
        blocks = self._quarantined.intersection(block_ids)
        self._quarantined -= blocks
        self.pool.free(sorted(blocks))

    def reset_prefix_cache(self) -> int:
        """Forget all contents: nothing computed until now is shared again. Returns how many blocks
        could have been shared.
        """
        for key in self._tables:
            self._names[key] = _Names(b"", shares=False)
        return self.pool.forget_names()

    def _names_of(self, request: Request) -> _Names:
        names = self._names.get(request.key)
        if names is None:
            names = self._names[request.key] = _Names(prefix.root(request.cache_salt))
        return names

    @property
    def remembered_keys(self) -> set[int]:
        """Requests of which anything is known here; `free` forgets."""
        return self._tables.keys() | self._names.keys()

    # --- checks -----------------------------------------------------------------------------------

    def leaked(self, live_keys: Iterable[int]) -> list[int]:
        """Blocks that are held, but by no live request, no quarantine and no copy."""
        live = set(live_keys)
        owned = {block for key, table in self._tables.items() if key in live for block in table}
        owned |= self._quarantined | {copy.source for copy in self._copies}
        return [b for b in range(self.pool.num_blocks) if self.pool.holders(b) and b not in owned]

    def check_integrity(self) -> None:
        """Assert that every holder of a block is accounted for. Between steps only: a step that
        copies blocks holds their sources.
        """
        self.pool.check_integrity()
        holders = [0] * self.pool.num_blocks
        owned = [block for table in self._tables.values() for block in table]
        owned += [*self._quarantined, *(copy.source for copy in self._copies)]
        for block in owned:
            holders[block] += 1
        for block in range(self.pool.num_blocks):
            held = self.pool.holders(block)
            assert held <= holders[block], f"block {block} has no owner for a hold"
            assert held >= holders[block], f"block {block} has an owner that does not hold it"
        assert all(self.pool.state(b) is BlockState.QUARANTINED for b in self._quarantined)
        assert all(table and len(set(table)) == len(table) for table in self._tables.values())
