"""The prefix cache on a real trace: all there is when it fits, and never above the optimum."""

from __future__ import annotations

import pytest

from benchmarks.prefix_cache import belady, infinite, measure, read_trace, replay


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return read_trace()


def test_a_pool_that_holds_the_working_set_finds_all_there_is(prompts: list[list[int]]) -> None:
    result = measure()
    full, quarter, sixteenth = result.rows
    assert result.requests == 2000
    assert full.hits >= 0.95 * result.infinite > 0
    for row in (full, quarter, sixteenth):
        assert 0 < row.hits <= row.optimum <= result.infinite


def test_the_optimum_on_a_trace_worked_by_hand() -> None:
    """Two blocks: LRU keeps the wrong one."""
    prompts = [[1], [2], [3], [1], [2], [1]]
    assert infinite(prompts) == 3
    # 3 evicts 2 (needed after 1); 1 is found; 2 evicts 3; 1 is found
    assert belady(prompts, 2) == 2
    assert replay(prompts, 2) == 1  # 3 evicts 1, 1 evicts 2, 2 evicts 3; the last 1 is found


def test_only_an_unbroken_run_from_the_first_block_counts() -> None:
    prompts = [[1, 2, 3], [1, 9, 3], [2, 3]]
    assert infinite(prompts) == 1 + 2  # as ids of the trace: [2, 3] were both seen
    assert belady(prompts, 9) == infinite(prompts)
    assert replay(prompts, 9) == 1  # as contents they are others: their beginning differs
