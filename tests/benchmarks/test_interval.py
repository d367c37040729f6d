"""Quantiles against a printed table, and what pairs say about a cost."""

from __future__ import annotations

import math

import pytest

from benchmarks.interval import Cost, student_t


@pytest.mark.parametrize(
    ("degrees", "printed"), [(1, 12.706), (2, 4.303), (9, 2.262), (29, 2.045), (1000, 1.962)]
)
def test_quantiles_are_those_of_the_tables(degrees: int, printed: float) -> None:
    assert student_t(0.975, degrees) == pytest.approx(printed, abs=5e-4)


def test_a_cost_is_a_percentage_with_an_interval_around_it() -> None:
    cost = Cost.of([0.96, 0.98, 0.96, 0.98])
    assert cost.mean == pytest.approx(100 * (1 - math.sqrt(0.96 * 0.98)))
    assert cost.low < 2 < cost.mean < 4 < cost.high < 5


def test_pairs_that_agree_leave_no_doubt_and_a_single_one_all_of_it() -> None:
    assert Cost.of([0.5, 0.5]) == Cost(50.0, 50.0, 50.0)
    assert Cost.of([2.0]) == Cost(-math.inf, -100.0, math.inf)
