from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.transfer.staging import Staging, StagingRing


def test_buffers_come_back_and_are_given_again() -> None:
    ring = StagingRing(100)
    first, second = ring.take(60), ring.take(40)
    assert first is not None
    assert second is not None
    assert ring.take(1) is None
    first.release()
    third = ring.take(60)
    assert third is not None
    assert third.view.data_ptr() == first.view.data_ptr()
    assert ring.in_use == 2
    with pytest.raises(AssertionError, match="twice"):
        first.release()


def test_a_fresh_buffer_needs_no_ring() -> None:
    staging = Staging.fresh(10)
    assert staging.view.numel() == 10
    staging.release()


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), max_size=60))
def test_live_buffers_never_overlap_and_all_room_returns(steps: list[tuple[int, int]]) -> None:
    ring = StagingRing(100)
    live: list[tuple[Staging, int]] = []
    for tag, (size, drop) in enumerate(steps):
        if drop < len(live):
            staging, mark = live.pop(drop)
            assert bool((staging.view == mark).all()), "somebody else wrote into a live buffer"
            staging.release()
        taken = ring.take(size)
        if taken is not None:
            taken.view.fill_(tag)
            live.append((taken, tag))
        ring.check_integrity()
        assert ring.in_use == len(live)
    for staging, mark in live:
        assert bool((staging.view == mark).all())
        staging.release()
    assert ring.take(100) is not None
