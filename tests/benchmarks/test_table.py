"""What a result looks like on paper."""

from __future__ import annotations

from benchmarks.rounds import Spread
from benchmarks.table import markdown, with_range


def test_a_table_is_markdown() -> None:
    assert markdown(["x", "y"], [["1", "2"]]) == "| x | y |\n|---|---|\n| 1 | 2 |"


def test_a_median_stands_before_its_range() -> None:
    assert with_range(Spread(0.5, 0.875, 2.0)) == "0.88 (0.50 to 2.00)"
