from __future__ import annotations

import os

import pytest

from benchmarks.handoff import child
from benchmarks.raw_tcp import TcpReceiver
from benchmarks.rounds import Spread, interleave, ratios
from benchmarks.table import markdown


def test_contenders_take_turns_and_swap_their_order() -> None:
    log: list[str] = []

    def runner(name: str) -> float:
        log.append(name)
        return float(len(log))

    results = interleave({"a": lambda: runner("a"), "b": lambda: runner("b")}, rounds=2, warm_up=1)
    assert log == ["b", "a", "a", "b", "b", "a"]
    assert results == {"a": [3.0, 6.0], "b": [4.0, 5.0]}  # the warm-up is not in it


def test_ratios_are_taken_round_by_round() -> None:
    assert ratios([2.0, 9.0, 4.0], [1.0, 3.0, 8.0]) == [2.0, 3.0, 0.5]
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(1.0, 2.0, 3.0)


def test_a_table_is_markdown() -> None:
    assert markdown(["x", "y"], [["1", "2"]]) == "| x | y |\n|---|---|\n| 1 | 2 |"


@pytest.mark.dist
def test_raw_tcp_moves_every_byte_asked_for() -> None:
    receiver = TcpReceiver()
    core = min(os.sched_getaffinity(0))
    with child("benchmarks.raw_tcp", str(receiver.port), core=core):
        receiver.accept()
        assert receiver.receive(3_000_001) > 0
        assert receiver.receive(1) > 0
        receiver.close()
