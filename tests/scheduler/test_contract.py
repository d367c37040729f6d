"""The clauses of the scheduler/worker contract that are the scheduler's: one named test each."""

from __future__ import annotations

import pytest

from tasuki.errors import RequestTooLongError
from tasuki.messages import FinishReason
from tasuki.scheduler.output import ModelRunnerOutput
from tests.scheduler.rig import answer, check, drain, hand_over, make, request, step


def test_c2_a_dispatch_to_the_model_carries_prefix_pending_tokens_and_the_whole_table() -> None:
    scheduler = make(num_blocks=8, max_num_batched_tokens=4)
    scheduler.add(request(7, prompt_len=6), 0.0)
    step(scheduler)
    plan = scheduler.schedule(0.0)
    (entry,) = plan.requests
    assert (entry.key, entry.num_computed_tokens, entry.token_ids) == (7, 4, [104, 105])
    assert list(entry.block_ids) == list(scheduler.blocks.table(7))
    assert len(entry.block_ids) * 4 >= 6
    scheduler.update(plan, answer(plan))


def test_c3_blocks_are_there_before_a_token_is_scheduled() -> None:
    """Growth included: with nothing left to allocate nothing is scheduled."""
    scheduler = make(num_blocks=6, max_num_batched_tokens=8)
    for key in range(4):
        scheduler.add(request(key, prompt_len=5, max_tokens=12), 0.0)
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        check(scheduler, plan)  # every position touched lies in the request's own blocks
        scheduler.update(plan, answer(plan))
        scheduler.check_integrity()
    assert scheduler.preemptions > 0


def test_c9_growth_that_finds_no_block_preempts_and_recomputes() -> None:
    scheduler = make(num_blocks=5)
    first, second = request(1, 7, max_tokens=10), request(2, 7, max_tokens=10)
    scheduler.add(first, 0.0)
    scheduler.add(second, 0.0)
    while not scheduler.preemptions:
        step(scheduler)
    assert (second.preemptions, second.num_computed_tokens) == (1, 0)
    assert not scheduler.blocks.table(2)
    known = second.num_tokens
    drain(scheduler)
    assert second.computed_prompt_tokens == 2 * 7  # the prompt was computed twice
    assert second.num_tokens == 17 > known  # and no token was lost


def test_c10_prompt_blocks_come_home_as_well_as_output_blocks() -> None:
    scheduler = make(num_blocks=8)
    one = request(1, prompt_len=16, max_tokens=9)
    scheduler.add(one, 0.0)
    step(scheduler)
    assert scheduler.blocks.num_free == 4  # the prompt's
    drain(scheduler)
    assert scheduler.blocks.num_free == 8


def test_c12_prompt_generated_cached_and_computed_are_four_counts() -> None:
    scheduler = make(prefix_caching=True)
    scheduler.add(request(1, prompt_len=8, max_tokens=1), 0.0)
    drain(scheduler)
    one = request(2, prompt_len=10, max_tokens=3)
    scheduler.add(one, 0.0)
    step(scheduler)
    assert one.prompt_len == 10
    assert one.cached_tokens == 8
    assert one.computed_prompt_tokens == 2
    assert one.num_computed_tokens == 10
    assert len(one.output_token_ids) == 1
    step(scheduler)
    assert (one.num_computed_tokens, len(one.output_token_ids)) == (11, 2)
    assert (one.prompt_len, one.cached_tokens, one.computed_prompt_tokens) == (10, 8, 2)


def test_c13_the_head_of_the_line_blocks_and_no_one_starves() -> None:
    """Small requests keep coming; the large one at the head gets in all the same."""
    scheduler = make(num_blocks=8)
    scheduler.add(request(0, 4, max_tokens=9), 0.0)
    step(scheduler)
    large = request(1, 26, max_tokens=2)
    scheduler.add(large, 0.0)
    for key in range(2, 40):
        scheduler.add(request(key, 4, max_tokens=9), 0.0)
        step(scheduler)
        if large.first_scheduled is not None:
            break
    assert large.first_scheduled is not None
    assert key < 12
    drain(scheduler)


def test_c14_a_token_budget_bounds_tokens_whatever_they_cost() -> None:
    """Two plans of one budget, at the start and at the end of a long context: same tokens. What a
    step may last is a matter of measuring: see the engine's default budget.
    """
    scheduler = make(num_blocks=600, max_num_batched_tokens=64)
    scheduler.add(request(1, prompt_len=2000), 0.0)
    sizes = []
    while scheduler.queued_tokens:
        sizes.append(sum(step(scheduler).values()))
    assert sizes == [64] * 31 + [16]


def test_c15_running_first_and_waiting_only_with_budget_left_and_nothing_preempted() -> None:
    scheduler = make(num_blocks=64, max_num_batched_tokens=4)
    for key in range(4):
        hand_over(scheduler, request(key, 4, max_tokens=9))
    scheduler.add(request(9, 4), 0.0)
    assert step(scheduler) == {0: 1, 1: 1, 2: 1, 3: 1}  # no budget left

    scheduler = make(num_blocks=4)
    scheduler.add(request(1, 7, max_tokens=8), 0.0)
    scheduler.add(request(2, 3, max_tokens=8), 0.0)
    scheduler.add(request(3, 1, max_tokens=1), 0.0)
    while not scheduler.preemptions:
        waited = {one.key for one in scheduler.waiting}
        plan = scheduler.schedule(0.0)
        keys = {entry.key for entry in plan.requests}
        scheduler.update(plan, answer(plan))
    assert not keys & waited  # in the step that preempted nobody was admitted
    drain(scheduler)


def test_c16_a_prefix_is_shared_only_under_the_same_cache_key() -> None:
    scheduler = make(prefix_caching=True)
    for key, salt in enumerate(("", "a", "b", "a", "", "c")):
        one = request(key, prompt_len=12, max_tokens=1, cache_salt=salt)
        scheduler.add(one, 0.0)
        drain(scheduler)
        assert one.cached_tokens == (11 if key in (3, 4) else 0), (key, salt)


def test_a_request_that_can_never_fit_is_refused() -> None:
    scheduler = make(num_blocks=4)
    with pytest.raises(RequestTooLongError, match="16"):
        scheduler.add(request(1, 10, max_tokens=7), 0.0)
    scheduler.add(request(2, 10, max_tokens=6), 0.0)
    drain(scheduler)


def test_the_last_one_running_never_deadlocks() -> None:
    """It may take every block there is, alone and after others gave way to it."""
    scheduler = make(num_blocks=4)
    for key in range(3):
        scheduler.add(request(key, 8, max_tokens=8), 0.0)
    drain(scheduler)
    assert scheduler.blocks.num_free == 4


def test_a_parked_request_never_blocks_the_queue() -> None:
    """Blocks reserved for a handoff are out of reach, and everybody else goes on."""
    scheduler = make(num_blocks=8)
    parked = request(1, 12)
    assert scheduler.reserve(parked, scheduler.blocks.match(parked))
    scheduler.add(request(2, 8, max_tokens=4), 0.0)
    scheduler.add(request(3, 4, max_tokens=4), 0.0)
    drain(scheduler)
    scheduler.unreserve(1)
    assert scheduler.blocks.num_free == 8


def test_a_reservation_leaves_growth_room_and_waits_for_preempted_requests() -> None:
    scheduler = make(num_blocks=14)
    for key in (1, 4):
        scheduler.add(request(key, 8, max_tokens=20), 0.0)
    step(scheduler)
    parked = request(2, 19)  # 5 of the 10 blocks left, and 5 with which one of the two can finish
    larger = request(5, 20)
    assert not scheduler.reserve(larger, scheduler.blocks.match(larger))
    scheduler.unreserve(5)
    assert scheduler.reserve(parked, scheduler.blocks.match(parked))
    other = request(3, 1)
    assert not scheduler.reserve(other, scheduler.blocks.match(other))
    scheduler.unreserve(3)
    while not scheduler.has_preempted:
        step(scheduler)
    scheduler.unreserve(2)
    assert not scheduler.reserve(other, scheduler.blocks.match(other))
    scheduler.unreserve(3)
    drain(scheduler)


def test_reserved_and_running_together_are_bounded() -> None:
    scheduler = make(max_num_seqs=2)
    parked = request(1, 4)
    assert scheduler.reserve(parked, scheduler.blocks.match(parked))
    for key in range(2, 5):
        scheduler.add(request(key, 4), 0.0)
    assert len(step(scheduler)) == 1
    other = request(9, 4)
    assert not scheduler.reserve(other, scheduler.blocks.match(other))
    scheduler.unreserve(9)
    scheduler.unreserve(1)
    drain(scheduler)


def test_a_holder_of_blocks_never_waits_behind_a_request_that_holds_none() -> None:
    scheduler = make(num_blocks=8, max_num_batched_tokens=16)
    scheduler.add(request(1, 20, max_tokens=2), 0.0)
    step(scheduler)
    scheduler.add(request(2, 30, max_tokens=2), 0.0)  # the head, and it does not fit
    assert hand_over(scheduler, request(3, 4, max_tokens=4))
    assert 3 in step(scheduler)
    drain(scheduler)


def test_the_budget_of_a_victim_goes_to_others_in_the_same_step() -> None:
    """By priority the victim may have been scheduled before the one that needs its blocks."""
    scheduler = make(num_blocks=6, max_num_batched_tokens=8, queue_order="priority")
    least = request(1, 3, max_tokens=8, priority=5)
    scheduler.add(least, 0.0)
    step(scheduler)
    assert hand_over(scheduler, request(2, 8, max_tokens=8, priority=1))
    while not scheduler.preemptions:
        plan = scheduler.schedule(0.0)
        check(scheduler, plan)
        scheduler.update(plan, answer(plan))
        scheduler.check_integrity()
    assert least.preemptions == 1
    assert [entry.key for entry in plan.requests] == [2]
    drain(scheduler)


def test_a_cancelled_victim_of_a_step_is_not_advanced_by_its_result() -> None:
    scheduler = make()
    one, other = request(1, 5), request(2, 5)
    scheduler.add(one, 0.0)
    scheduler.add(other, 0.0)
    plan = scheduler.schedule(0.0)
    scheduler.cancel(one, FinishReason.CANCELLED)
    (update,) = scheduler.update(plan, ModelRunnerOutput(plan.step, {1: 7, 2: 7}))
    assert update.request is other
    assert scheduler.stale_results == 1
    drain(scheduler)
