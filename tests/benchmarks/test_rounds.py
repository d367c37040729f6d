"""Turns, ratios and shares of rounds."""

from __future__ import annotations

import pytest

from benchmarks.rounds import Spread, interleave, ratios, share_out


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


def test_every_ratio_needs_both_sides() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("rounds", "turns", "shares"),
    [(20, 5, [4, 4, 4, 4, 4]), (7, 5, [2, 2, 1, 1, 1]), (2, 5, [1, 1]), (1, 1, [1])],
)
def test_rounds_are_shared_out_and_none_is_lost(rounds: int, turns: int, shares: list[int]) -> None:
    assert share_out(rounds, turns) == shares
