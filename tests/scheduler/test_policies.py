"""What an operator may choose: step order, admission, batching, queue order, head of the line."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasuki.request import Request
from tasuki.scheduler.config import QueueOrder, SchedulerConfig
from tasuki.scheduler.waiting_queue import WaitingQueue
from tests.scheduler.rig import drain, hand_over, make, request, step

# --- step order ---------------------------------------------------------------------------------


def test_prefill_first_gives_the_budget_to_prompts() -> None:
    scheduler = make(step_order="prefill_first", max_num_batched_tokens=8)
    scheduler.add(request(1, 4, max_tokens=9), 0.0)
    step(scheduler)
    scheduler.add(request(2, 12, max_tokens=9), 0.0)
    assert step(scheduler) == {2: 8}
    assert step(scheduler) == {2: 4, 1: 1}
    assert step(scheduler) == {1: 1, 2: 1}
    drain(scheduler)


def test_prefill_first_under_pressure_ends_and_conserves() -> None:
    scheduler = make(num_blocks=6, step_order="prefill_first", max_num_batched_tokens=8)
    for key in range(6):
        scheduler.add(request(key, 5, max_tokens=12), 0.0)
    drain(scheduler)
    assert scheduler.blocks.num_free == 6


def test_a_long_prompt_takes_no_more_than_its_threshold() -> None:
    scheduler = make(max_num_batched_tokens=32, long_prefill_token_threshold=8)
    scheduler.add(request(1, 20), 0.0)
    scheduler.add(request(2, 4), 0.0)
    assert step(scheduler) == {1: 8, 2: 4}
    assert step(scheduler) == {1: 8, 2: 1}
    drain(scheduler)


def test_more_running_than_tokens_is_not_admitted() -> None:
    """Everyone that runs gets a token in every step, so the budget bounds them as well."""
    scheduler = make(max_num_batched_tokens=3)
    for key in range(5):
        scheduler.add(request(key, 1, max_tokens=3), 0.0)
    assert step(scheduler) == {0: 1, 1: 1, 2: 1}
    assert step(scheduler) == {0: 1, 1: 1, 2: 1}
    drain(scheduler)


# --- admission ------------------------------------------------------------------------------------


def test_reserve_max_never_preempts() -> None:
    scheduler = make(num_blocks=6, admission="reserve_max")
    for key in range(6):
        scheduler.add(request(key, 5, max_tokens=7), 0.0)
    assert step(scheduler) == {0: 5, 1: 5}  # 12 positions each, of 24
    drain(scheduler)
    assert scheduler.preemptions == 0


def test_optimistic_admission_lets_more_run() -> None:
    scheduler = make(num_blocks=10)
    for key in range(6):
        scheduler.add(request(key, 5, max_tokens=19), 0.0)
    assert len(step(scheduler)) > 2
    drain(scheduler)
    assert scheduler.preemptions > 0


# --- batching -------------------------------------------------------------------------------------


def test_a_static_batch_is_closed_until_it_ends() -> None:
    scheduler = make(batching="static", max_num_seqs=2)
    for key, tokens in enumerate((1, 4, 1, 1)):
        scheduler.add(request(key, 2, max_tokens=tokens), 0.0)
    members = [sorted(step(scheduler)) for _ in range(5)]
    assert members == [[0, 1], [1], [1], [1], [2, 3]]
    assert scheduler.membership.reserved_slot_steps == 10
    assert scheduler.membership.useful_slot_steps == 7


def test_a_static_batch_is_seated_over_several_steps_when_its_prompts_are_long() -> None:
    scheduler = make(batching="static", max_num_seqs=3, max_num_batched_tokens=8)
    for key in range(3):
        scheduler.add(request(key, 8, max_tokens=3), 0.0)
    step(scheduler)
    late = request(9, 1)
    scheduler.add(late, 0.0)
    for _ in range(20):
        if late.first_scheduled is not None:
            break
        assert set(step(scheduler)) <= {0, 1, 2, 9}
        assert 9 not in {one.key for one in scheduler.running} or len(scheduler.running) == 1
    drain(scheduler)


def test_a_preempted_member_of_a_static_batch_comes_back() -> None:
    scheduler = make(num_blocks=5, batching="static", max_num_seqs=2)
    for key in range(4):
        scheduler.add(request(key, 7, max_tokens=10), 0.0)
    drain(scheduler)
    assert scheduler.preemptions > 0


def test_a_dynamic_batch_waits_for_company_or_for_its_window() -> None:
    scheduler = make(batching="dynamic", batch_window=1.0, max_num_seqs=2)
    scheduler.add(request(1, 2, max_tokens=2), 10.0)
    assert step(scheduler, now=10.9) == {}
    assert step(scheduler, now=11.0) == {1: 2}
    scheduler.add(request(2, 2, max_tokens=1), 11.0)
    assert step(scheduler, now=20.0) == {1: 1}  # the batch is closed
    scheduler.add(request(3, 2, max_tokens=1), 20.0)
    assert step(scheduler, now=20.0) == {2: 2, 3: 2}  # full: no need to wait


# --- order ----------------------------------------------------------------------------------------


def queue_of(**config: Any) -> WaitingQueue:
    return WaitingQueue(SchedulerConfig(queue_order=QueueOrder.PRIORITY, **config))


def test_the_lower_priority_number_goes_first_and_ties_by_arrival() -> None:
    queue = queue_of()
    for key, priority in enumerate((3, 0, 3, -2)):
        queue.push(request(key, 1, priority=priority, arrived=key * 0.01))
    assert [one.key for one in queue] == [3, 1, 0, 2]


def test_a_preempted_request_stands_at_the_head_whatever_its_priority() -> None:
    queue = queue_of()
    queue.push(request(1, 1, priority=-5))
    queue.push_front(request(2, 1, priority=9))
    assert [one.key for one in queue] == [2, 1]
    assert queue.num_resuming == 1
    queue.remove(next(iter(queue)))
    assert [one.key for one in queue] == [1]


arrivals = st.lists(
    st.tuples(st.integers(-3, 3), st.floats(0, 100, allow_nan=False)), min_size=1, max_size=40
)


@settings(max_examples=100, deadline=None)
@given(arrivals, st.floats(0.5, 20))
def test_nobody_is_overtaken_by_those_who_come_later_than_the_bound(
    requests: list[tuple[int, float]], ageing: float
) -> None:
    """The bound on waiting: ageing times the levels of priority between two requests."""
    queue = queue_of(priority_ageing=ageing)
    for key, (priority, arrived) in enumerate(sorted(requests, key=lambda r: r[1])):
        queue.push(request(key, 1, priority=priority, arrived=arrived))
    order = list(queue)
    for place, one in enumerate(order):
        for other in order[:place]:
            levels = max(0, one.priority - other.priority)
            assert other.arrived <= one.arrived + levels * ageing + 1e-9
    queue.check_integrity()


def test_ageing_lets_an_unimportant_request_in_while_important_ones_keep_coming() -> None:
    """One slot, one important request per second, each a second long: never a free moment."""
    scheduler = make(max_num_seqs=1, queue_order="priority", priority_ageing=5.0)
    unimportant = request(0, 1, max_tokens=1, priority=3, arrived=0.0)
    scheduler.add(request(1, 1, max_tokens=1, arrived=0.0), 0.0)
    scheduler.add(unimportant, 0.0)
    for second in range(1, 60):
        scheduler.add(request(second + 1, 1, max_tokens=1, arrived=float(second)), float(second))
        step(scheduler, now=float(second))
        if unimportant.first_scheduled is not None:
            break
    assert unimportant.first_scheduled is not None
    assert 15 <= unimportant.first_scheduled <= 17  # 3 levels of 5 seconds, and one in service
    drain(scheduler)


def test_by_priority_the_least_important_gives_way_even_if_it_came_first() -> None:
    scheduler = make(num_blocks=7, queue_order="priority")
    low, high = request(1, 7, 10, priority=1), request(2, 7, 10, priority=0)
    scheduler.add(low, 0.0)
    step(scheduler)
    assert hand_over(scheduler, high)
    while not scheduler.preemptions:
        step(scheduler)
    assert (low.preemptions, high.preemptions) == (1, 0)
    drain(scheduler)


# --- the head of the line -------------------------------------------------------------------------


def blocked_head(**config: Any) -> tuple[Any, Request]:
    scheduler = make(num_blocks=10, **config)
    scheduler.add(request(0, 16, max_tokens=12), 0.0)
    step(scheduler)
    large = request(1, 20, max_tokens=2)
    scheduler.add(large, 0.0)
    for key in range(2, 6):
        scheduler.add(request(key, 2, max_tokens=1), 0.0)
    return scheduler, large


def test_a_head_that_does_not_fit_blocks_by_default() -> None:
    scheduler, _ = blocked_head()
    assert step(scheduler) == {0: 1}
    drain(scheduler)


def test_a_head_that_does_not_fit_is_passed_so_often_and_no_more() -> None:
    scheduler, large = blocked_head(max_bypasses=2)
    assert step(scheduler) == {0: 1, 2: 2, 3: 2}
    assert large.bypasses == 2
    assert step(scheduler) == {0: 1}
    drain(scheduler)
    assert large.bypasses == 2


@pytest.mark.parametrize(
    "bad",
    [
        {"step_order": "random"},
        {"batching": "sometimes"},
        {"batch_window": -1.0},
        {"priority_ageing": 0.0},
        {"max_bypasses": True},
        {"long_prefill_token_threshold": -1},
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected|not a valid"):
        SchedulerConfig(**bad)
