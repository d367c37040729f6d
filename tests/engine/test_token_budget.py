"""The token budget that keeps a step short, against steps whose cost is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tasuki.engine.token_budget import LEAST, MOST, SAFETY, STEP_SECONDS, choose, worst_step
from tasuki.kv.layout import KVLayout
from tasuki.scheduler.config import SchedulerConfig

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=16)


def linear(fixed: float, per_token: float) -> Callable[[int], float]:
    return lambda tokens: fixed + per_token * tokens


@pytest.mark.parametrize(
    ("fixed", "per_token"), [(0.01, 0.001), (0.05, 0.0004), (0.0, 0.005), (0.02, 0.0001)]
)
def test_it_is_the_largest_that_keeps_a_step_short(fixed: float, per_token: float) -> None:
    run = linear(fixed, per_token)
    budget = choose(run)
    assert run(budget) <= STEP_SECONDS * SAFETY < run(budget + 16)


def test_it_is_bounded_both_ways() -> None:
    assert choose(linear(5.0, 0.1)) == LEAST
    assert choose(linear(0.0, 1e-9)) == MOST


def test_few_steps_are_tried() -> None:
    tried: list[int] = []

    def run(tokens: int) -> float:
        tried.append(tokens)
        return tokens * 0.001

    choose(run)
    assert tried == [16, 32, 64, 128, 256]


def test_a_prefill_worker_never_decodes() -> None:
    config = SchedulerConfig(max_num_seqs=32, max_model_len=2048, allocate_whole_prompt=True)
    (entry,) = worst_step(64, config, LAYOUT, 400).requests
    assert len(entry.token_ids) == 64


@pytest.mark.parametrize("tokens", [16, 64, 65, 300, 5000])
@pytest.mark.parametrize("num_blocks", [4, 40, 400])
def test_the_worst_step_is_a_full_batch_and_a_chunk_at_the_end(
    tokens: int, num_blocks: int
) -> None:
    config = SchedulerConfig(max_num_seqs=32, max_model_len=2048)
    plan = worst_step(tokens, config, LAYOUT, num_blocks)
    longest = min(2048, num_blocks * 16)
    last = plan.requests[-1]
    assert last.num_computed_tokens + len(last.token_ids) == longest
    assert len(plan.requests) == min(tokens, 32)
    assert plan.num_tokens == min(tokens, len(plan.requests) - 1 + longest)
    for entry in plan.requests:
        end = entry.num_computed_tokens + len(entry.token_ids)
        assert entry.num_computed_tokens >= 0
        assert len(entry.block_ids) == LAYOUT.blocks_for(end)
        assert set(entry.block_ids) <= set(range(num_blocks))
