from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tasuki.kv.block_pool import BlockPool, BlockState


def test_adjacent_blocks_are_handed_out_first() -> None:
    pool = BlockPool(8)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) == [3, 4]
    pool.free([1, 3])
    assert pool.allocate(2) == [1, 3]


def test_all_or_nothing() -> None:
    pool = BlockPool(2)
    assert pool.allocate(3) is None
    assert pool.num_free == 2


def test_freeing_twice_is_caught() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


class PoolMachine(RuleBasedStateMachine):
    """Any order of taking, marking and freeing conserves blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.held: list[int] = []

    @rule(count=st.integers(0, 13), reserved=st.booleans())
    def allocate(self, count: int, reserved: bool) -> None:
        free = self.pool.num_free
        state = BlockState.RESERVED if reserved else BlockState.IN_USE
        blocks = self.pool.allocate(count, state)
        assert (blocks is None) == (count > free)
        assert not set(blocks or []) & set(self.held)
        self.held += blocks or []

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        self.pool.mark([data.draw(st.sampled_from(self.held))], BlockState.QUARANTINED)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.pool.free([block])

    @invariant()
    def conserved(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == 12 - len(self.held)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
