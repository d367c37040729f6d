"""Every arm of the cost benchmark moves the bytes over the one link, and its report is whole."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from benchmarks.cost_ends import cut
from benchmarks.handoff_cost import (
    ARMS,
    QUESTIONS,
    HandoffCostResult,
    SizeResult,
    fresh_link,
    measure,
    report,
)
from benchmarks.interval import Cost
from benchmarks.link_ends import LAYOUT, touched_cache
from benchmarks.pinning import own_cores, pinned
from benchmarks.rounds import Spread
from tasuki.kv.cache import KVCache

BLOCKS = 27  # more than a window, and no multiple of a segment


@pytest.mark.dist
def test_all_arms_move_every_byte_over_one_channel() -> None:
    cache = touched_cache()
    core, far_core = own_cores()
    with pinned(core), fresh_link(cache, far_core) as receiver:
        for arm in ARMS.values():
            cache.tensor.fill_(0)
            assert receiver.turn(arm, BLOCKS, 1) > 0
            received, rest = cache.tensor[:BLOCKS], cache.tensor[BLOCKS:]
            assert (received != 0).float().mean() > 0.99  # the sender's are random numbers
            assert not torch.any(rest)


@pytest.mark.dist
def test_a_few_rounds_fill_every_field() -> None:
    result = measure(rounds=2, sizes=(BLOCKS,), turn_bytes=1)
    found = json.loads(json.dumps(dataclasses.asdict(result)))
    assert (found["rounds"], found["pairs"], found["turn_bytes"]) == (2, 2, 1)
    (size,) = found["sizes"]
    assert size["nbytes"] == BLOCKS * LAYOUT.block_bytes
    assert set(size["speeds"]) == set(ARMS)
    assert all(0 < speed["low"] <= speed["high"] for speed in size["speeds"].values())
    assert set(size["costs"]) == set(QUESTIONS)
    for cost in size["costs"].values():
        assert math.isfinite(cost["high"])
        assert cost["low"] <= cost["mean"] <= cost["high"] <= 100


def test_a_round_is_cut_into_the_segments_of_a_link() -> None:
    cache = KVCache(LAYOUT, 12)
    views = cut(cache, 12)
    assert [view.numel() // LAYOUT.block_bytes for view in views] == [5, 5, 2]
    assert views[1].data_ptr() - views[0].data_ptr() == views[0].numel()


def test_only_the_bare_arm_lacks_everything() -> None:
    assert [name for name, arm in ARMS.items() if not any(dataclasses.astuple(arm))] == ["bare"]
    assert all(dataclasses.astuple(ARMS["full"]))
    assert {name for pair in QUESTIONS.values() for name in pair} == set(ARMS)


def test_the_report_gives_each_cost_with_its_interval_and_a_verdict() -> None:
    speeds = {name: Spread(1e9, 2e9, 3e9) for name in ARMS} | {"bare": Spread(1e9, 4e9, 5e9)}
    costs = {name: Cost(-1.0, 2.0, 4.5) for name in QUESTIONS}
    within = SizeResult(1 << 20, speeds, costs)
    beyond = SizeResult(1 << 20, speeds, costs | {"all": Cost(1.0, 4.0, 5.0)})
    text = report(HandoffCostResult((within, beyond), 30, 15, 1 << 30))
    cells = " | ".join(["2.0 (-1.0 to 4.5)"] * len(QUESTIONS))
    assert f"| 1.0 MiB | 2.00 | 4.00 | {cells} | yes |" in text
    assert "| 1.0 MiB | 2.00 | 4.00 | 4.0 (1.0 to 5.0) | 2.0 (-1.0 to 4.5) | " in text
    assert text.count("| no |") == 1
    assert "30 interleaved pairs over 15 connections; a turn moves 1024 MiB" in text
