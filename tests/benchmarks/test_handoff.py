"""Both ways of the handoff benchmark move every byte between real processes, and end cleanly."""

from __future__ import annotations

import os
import time
from contextlib import closing

import pytest
import torch

from benchmarks.child import child
from benchmarks.handoff import HandoffResult, SizeResult, fresh_pair, report
from benchmarks.link_ends import LAYOUT, touched_cache
from benchmarks.pinning import own_cores, pinned
from benchmarks.raw_tcp import TcpReceiver
from benchmarks.rounds import Spread


@pytest.mark.dist
def test_raw_tcp_moves_every_byte_asked_for() -> None:
    with (
        closing(TcpReceiver()) as receiver,
        child("benchmarks.raw_tcp", str(receiver.port), core=own_cores()[0]),
    ):
        receiver.accept()
        assert receiver.receive(3_000_001) > 0
        assert receiver.receive(1) > 0
        receiver.close()  # the child ends by itself then


@pytest.mark.dist
def test_a_pair_hands_blocks_over_and_leaves_nothing() -> None:
    cache = touched_cache()
    cache.tensor.fill_(0)
    core, far_core = own_cores()
    with pinned(core), fresh_pair(cache, far_core) as (receiver, tcp):
        assert receiver.receive(3) > 0
        assert tcp.receive(3 * LAYOUT.block_bytes) > 0
        received, rest = cache.tensor[:3], cache.tensor[3:]
        assert (received != 0).float().mean() > 0.99  # the sender's are random numbers
        assert not torch.any(rest)


def test_a_child_that_will_not_go_is_ended() -> None:
    began = time.monotonic()
    with (
        pytest.raises(RuntimeError, match="enough"),
        child("http.server", "0", core=own_cores()[0]),
    ):
        raise RuntimeError("enough")
    assert time.monotonic() - began < 4


def test_a_pin_ends_with_its_block() -> None:
    before = os.sched_getaffinity(0)
    with pinned(own_cores()[1]):
        assert os.sched_getaffinity(0) == {own_cores()[1]}
    assert os.sched_getaffinity(0) == before


def test_the_report_gives_speeds_and_the_rounds_own_ratio() -> None:
    size = SizeResult(1 << 20, Spread(1e9, 2e9, 3e9), Spread(2e9, 4e9, 5e9), Spread(0.4, 0.6, 0.7))
    text = report(HandoffResult((size,), 20, 5, 11e9, "cubic"))
    assert "| 1.0 MiB | 2.00 | 4.00 | 0.60 (0.40 to 0.70) |" in text
    assert "20 rounds over 5 fresh pairs" in text
    assert "memcpy 11.0 GB/s" in text
