"""The scheduler against a runner that gives token 7 to whoever asks."""

from __future__ import annotations

import pytest

from tasuki.messages import FinishReason, SamplingParams
from tasuki.request import RequestStatus
from tasuki.scheduler.config import SchedulerConfig
from tasuki.scheduler.output import ModelRunnerOutput
from tests.scheduler.rig import answer, drain, hand_over, make, request, step


def test_one_request_from_prompt_to_last_token() -> None:
    scheduler = make()
    one = request(1, prompt_len=5, max_tokens=3)
    scheduler.add(one, 0.0)
    assert [step(scheduler) for _ in range(3)] == [{1: 5}, {1: 1}, {1: 1}]
    assert one.output_token_ids == [7, 7, 7]
    assert one.finish_reason is FinishReason.LENGTH
    assert one.computed_prompt_tokens == 5
    assert scheduler.blocks.num_free == 64


def test_a_long_prompt_is_computed_in_chunks_beside_running_requests() -> None:
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(request(1, prompt_len=3, max_tokens=9), 0.0)
    step(scheduler)
    scheduler.add(request(2, prompt_len=20), 0.0)
    assert step(scheduler) == {1: 1, 2: 7}
    assert step(scheduler) == {1: 1, 2: 7}
    assert step(scheduler) == {1: 1, 2: 6}


def test_a_chunk_never_starves_a_running_request_behind_it() -> None:
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(request(1, prompt_len=40), 0.0)
    step(scheduler)
    handed_over = request(2, prompt_len=4)
    hand_over(scheduler, handed_over)
    assert step(scheduler) == {1: 7, 2: 1}


def test_eos_ends_a_request_unless_ignored() -> None:
    scheduler = make()
    stops, goes_on = request(1, 3), request(2, 3)
    goes_on.sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    scheduler.add(stops, 0.0)
    scheduler.add(goes_on, 0.0)
    step(scheduler, token_id=2)
    assert stops.finish_reason is FinishReason.STOP
    assert goes_on.finish_reason is None
    drain(scheduler)


def test_growth_preempts_the_latest_and_it_starts_over_with_its_tokens() -> None:
    scheduler = make(num_blocks=5)
    first, second = request(1, 7, max_tokens=10), request(2, 7, max_tokens=10)
    scheduler.add(first, 0.0)
    scheduler.add(second, 0.0)
    while not scheduler.preemptions:
        step(scheduler)
    assert second.preemptions == 1
    assert first.preemptions == 0
    assert second.num_computed_tokens == 0
    assert next(iter(scheduler.waiting)) is second
    assert scheduler.has_preempted
    drain(scheduler)
    assert len(first.output_token_ids) == len(second.output_token_ids) == 10
    assert scheduler.blocks.num_free == 5


def test_nothing_is_admitted_in_a_step_that_preempted() -> None:
    scheduler = make(num_blocks=5)
    scheduler.add(request(1, 7, max_tokens=10), 0.0)
    scheduler.add(request(2, 7, max_tokens=10), 0.0)
    while not scheduler.preemptions:
        plan = scheduler.schedule(0.0)
        keys = {entry.key for entry in plan.requests}
        scheduler.update(plan, answer(plan))
    assert keys == {1}


def test_the_head_of_the_queue_blocks_those_behind_it() -> None:
    scheduler = make(num_blocks=4)
    scheduler.add(request(1, 8, max_tokens=8), 0.0)
    step(scheduler)
    scheduler.add(request(2, 12), 0.0)  # does not fit now
    scheduler.add(request(3, 1), 0.0)  # would fit
    assert step(scheduler) == {1: 1}


def test_a_request_cancelled_in_flight_frees_its_blocks_only_after_the_step() -> None:
    scheduler = make()
    one = request(1, 5)
    scheduler.add(one, 0.0)
    plan = scheduler.schedule(0.0)
    scheduler.cancel(one, FinishReason.CANCELLED)
    assert scheduler.blocks.num_free < 64  # the forward may still write
    assert scheduler.update(plan, answer(plan)) == []
    assert scheduler.stale_results == 1
    assert one.output_token_ids == []
    assert scheduler.blocks.num_free == 64
    scheduler.check_integrity()


def test_a_cancelled_waiting_request_leaves_the_queue() -> None:
    scheduler = make()
    one = request(1, 5)
    scheduler.add(one, 0.0)
    scheduler.cancel(one, FinishReason.CANCELLED)
    scheduler.cancel(one, FinishReason.CANCELLED)  # twice is once
    assert not scheduler.has_work
    assert one.status is RequestStatus.FINISHED


def test_a_result_of_another_step_is_counted_and_dropped() -> None:
    scheduler = make()
    one = request(1, 5)
    scheduler.add(one, 0.0)
    plan = scheduler.schedule(0.0)
    assert scheduler.update(plan, ModelRunnerOutput(plan.step + 1, {1: 7})) == []
    assert scheduler.stale_results == 1
    assert one.num_computed_tokens == 0


def test_a_request_that_holds_blocks_keeps_them_until_released() -> None:
    scheduler = make(allocate_whole_prompt=True)
    one = request(1, 5, max_tokens=1)
    one.holds_blocks = True
    scheduler.add(one, 0.0)
    step(scheduler)
    assert one.status is RequestStatus.FINISHED
    assert scheduler.blocks.num_free == 62
    scheduler.release(one)
    assert scheduler.blocks.num_free == 64


def test_the_whole_prompt_is_allocated_at_admission_where_configured() -> None:
    scheduler = make(allocate_whole_prompt=True, max_num_batched_tokens=4)
    scheduler.add(request(1, 16), 0.0)
    step(scheduler)
    assert len(scheduler.blocks.table(1)) == 4


def test_the_models_last_position_ends_a_request() -> None:
    scheduler = make(max_model_len=8)
    one = request(1, 6, max_tokens=50)
    scheduler.add(one, 0.0)
    drain(scheduler)
    assert one.num_tokens == 8
    assert one.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("bad", [0, -1, True, 1.5])
def test_a_limit_that_is_no_positive_integer_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        SchedulerConfig(max_num_seqs=bad)
