from __future__ import annotations

import pytest

from tasuki.errors import LayoutMismatchError
from tasuki.kv.block_pool import BlockState
from tasuki.kv.layout import KVLayout, require_same_layout
from tasuki.kv.manager import NO_PREFIX, KVCacheManager
from tasuki.messages import SamplingParams
from tasuki.request import Request

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=4)


def make(num_blocks: int = 8) -> KVCacheManager:
    return KVCacheManager(LAYOUT, num_blocks)


def request(key: int, token_ids: list[int], salt: str = "") -> Request:
    sampling = SamplingParams(max_tokens=9)
    return Request(key, "r", token_ids, sampling, frozenset(), 0.0, cache_salt=salt)


def reserve(
    blocks: KVCacheManager, key: int, num_tokens: int, headroom: int = 0
) -> list[int] | None:
    """Blocks for a handoff, none of them cached."""
    one = request(key, [1])
    state = BlockState.RESERVED
    if not blocks.begin(one, NO_PREFIX, num_tokens, headroom=headroom, state=state):
        return None
    return list(blocks.table(key))


def test_tables_grow_and_never_change_what_they_hold() -> None:
    blocks = make()
    assert blocks.grow(1, 5)
    before = list(blocks.table(1))
    assert blocks.grow(2, 4)
    assert blocks.grow(1, 12)
    assert list(blocks.table(1))[:2] == before
    assert not blocks.grow(2, 24)
    assert len(blocks.table(2)) == 1
    blocks.check_integrity()


def test_a_reservation_leaves_headroom() -> None:
    blocks = make(4)
    assert reserve(blocks, 1, 12, headroom=2) is None
    assert reserve(blocks, 1, 12, headroom=1) is not None
    assert blocks.pool.counts()[BlockState.RESERVED] == 3


def test_an_abandoned_handoff_keeps_what_arrived_and_replaces_what_is_in_flight() -> None:
    blocks = make(8)
    table = reserve(blocks, 1, 20) or []
    blocks.abandon(1, keep=2, in_flight=frozenset(table[2:4]))
    now = list(blocks.table(1))
    assert now[:2] == table[:2]
    assert not set(now[2:4]) & set(table)
    assert now[4] == table[4]
    assert blocks.pool.counts()[BlockState.QUARANTINED] == 2
    blocks.check_integrity()
    blocks.release(table[2:4])
    assert blocks.pool.counts()[BlockState.QUARANTINED] == 0
    blocks.free(1)
    assert blocks.num_free == 8


def test_without_fresh_blocks_the_table_ends_early_and_nothing_is_lost() -> None:
    blocks = make(5)
    table = reserve(blocks, 1, 20) or []
    blocks.abandon(1, keep=1, in_flight=frozenset({table[2], table[3]}))
    assert list(blocks.table(1)) == table[:2]
    assert blocks.num_free == 1
    blocks.check_integrity()
    blocks.free(1)
    blocks.release(table)
    assert blocks.num_free == 5


def test_a_handoff_that_starts_anew_lands_elsewhere() -> None:
    blocks = make(8)
    table = reserve(blocks, 1, 20) or []
    assert blocks.replace(1, frozenset(table[2:4]))
    now = list(blocks.table(1))
    assert now[:2] == table[:2]
    assert not set(now[2:4]) & set(table)
    assert now[4] == table[4]
    counts = blocks.pool.counts()
    assert (counts[BlockState.RESERVED], counts[BlockState.QUARANTINED]) == (5, 2)
    assert not blocks.replace(1, frozenset(now[:2]))  # one is free, and two would be needed
    assert list(blocks.table(1)) == now
    blocks.check_integrity()
    blocks.free(1)
    blocks.release(table)
    assert blocks.num_free == 8


def test_a_handoff_that_leaves_no_block_leaves_no_trace() -> None:
    blocks = make(2)
    table = reserve(blocks, 1, 8) or []
    blocks.abandon(1, keep=0, in_flight=frozenset(table))
    assert blocks.remembered_keys == set()
    blocks.check_integrity()
    blocks.release(table)
    assert blocks.begin(request(1, [1, 2]), NO_PREFIX, 2)


def test_blocks_in_flight_outlive_their_request_in_quarantine() -> None:
    blocks = make(4)
    table = reserve(blocks, 1, 8) or []
    blocks.free(1, in_flight=frozenset(table[:1]))
    assert blocks.num_free == 3
    blocks.release(table[:1])
    blocks.release(table[:1])  # a second word about the same block changes nothing
    assert blocks.num_free == 4


def test_a_planted_leak_is_caught() -> None:
    blocks = make()
    blocks.grow(1, 4)
    assert blocks.leaked([1]) == []
    assert blocks.leaked([]) == list(blocks.table(1))
    blocks.pool.allocate(1)
    with pytest.raises(AssertionError, match="no owner for a hold"):
        blocks.check_integrity()


def test_a_layout_mismatch_names_the_field() -> None:
    mine = LAYOUT.describe(model_id="m", weights_digest="d", numerics="a")
    same = LAYOUT.describe(model_id="m", weights_digest="d", numerics="b")
    require_same_layout(mine, same)
    other = KVLayout(2, 1, 4, 8).describe(model_id="m", weights_digest="d", numerics="a")
    with pytest.raises(LayoutMismatchError, match="block_size"):
        require_same_layout(mine, other)
