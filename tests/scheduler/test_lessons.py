"""The first lesson's numbers, on this scheduler: unit-cost steps, block size 1, reserve_max."""

from __future__ import annotations

from typing import Any

import pytest

from tasuki.errors import InvalidRequestError, RequestTooLongError
from tasuki.messages import SamplingParams
from tasuki.request import Request
from tasuki.scheduler.scheduler import Scheduler
from tests.scheduler.rig import answer, check, make, request


def lesson(capacity: int, kv_budget: int, batching: str = "continuous") -> Scheduler:
    return make(
        kv_budget,
        block_size=1,
        admission="reserve_max",
        batching=batching,
        max_num_seqs=capacity,
        max_num_batched_tokens=10_000,
    )


def simulate(scheduler: Scheduler, lengths: list[int], prompt_len: int = 2) -> dict[str, Any]:
    requests = [request(n, prompt_len, max_tokens=tokens) for n, tokens in enumerate(lengths)]
    for one in requests:
        scheduler.add(one, 0.0)
    clock, reserved = 0, []
    finished: dict[int, int] = {}
    while scheduler.has_work:
        plan = scheduler.schedule(float(clock))
        check(scheduler, plan)
        reserved.append(scheduler.blocks.pool.num_blocks - scheduler.blocks.num_free)
        clock += 1
        for update in scheduler.update(plan, answer(plan)):
            if update.request.finish_reason is not None:
                finished[update.request.key] = clock
        scheduler.check_integrity()
    tokens = sum(len(one.output_token_ids) for one in requests)
    return {"steps": clock, "finished": finished, "tokens": tokens, "reserved": reserved}


def test_static_takes_five_steps_and_continuous_four() -> None:
    static = simulate(lesson(2, 30, "static"), [1, 4, 1, 1])
    continuous = simulate(lesson(2, 30), [1, 4, 1, 1])
    assert (static["steps"], continuous["steps"]) == (5, 4)
    assert continuous["finished"] == {0: 1, 2: 2, 3: 3, 1: 4}
    assert static["tokens"] == continuous["tokens"] == 7


@pytest.mark.parametrize("batching", ["static", "continuous"])
def test_no_queue_means_no_gain(batching: str) -> None:
    assert simulate(lesson(2, 10, batching), [4])["steps"] == 4


def test_memory_limits_before_the_nominal_batch_size() -> None:
    result = simulate(lesson(20, 6), [1, 4, 1, 1])
    assert max(result["reserved"]) <= 6
    assert result["tokens"] == 7


def test_the_slots_of_a_static_batch() -> None:
    """970 of 2,000 slot-steps are useful."""
    scheduler = lesson(4, 2000, "static")
    simulate(scheduler, [20, 500, 200, 250])
    slots = scheduler.membership
    assert (slots.useful_slot_steps, slots.reserved_slot_steps) == (970, 2000)
    assert slots.useful_slot_steps / slots.reserved_slot_steps == 0.485


def test_a_continuous_batch_reserves_no_idle_slots() -> None:
    scheduler = lesson(4, 2000)
    simulate(scheduler, [20, 500, 200, 250])
    assert scheduler.membership.useful_slot_steps == scheduler.membership.reserved_slot_steps == 970


def test_one_long_request_idles_the_slots_of_a_static_batch() -> None:
    """The second lesson: 8 requests, one of 500 steps and seven of 50: 78.75 % idle. And A, done
    after 20 of B's 500 steps, sits there for 480.
    """
    scheduler = lesson(8, 2000, "static")
    simulate(scheduler, [500] + [50] * 7)
    slots = scheduler.membership
    assert 1 - slots.useful_slot_steps / slots.reserved_slot_steps == 0.7875

    scheduler = lesson(2, 2000, "static")
    finished = simulate(scheduler, [20, 500])["finished"]
    assert finished[1] - finished[0] == 480
    assert scheduler.membership.reserved_slot_steps - scheduler.membership.useful_slot_steps == 480


def test_a_reservation_is_not_a_computed_token_count() -> None:
    """Prompt 3, cap 2: 5 are reserved and 4 computed; in between, 3 positions and 1 token pending.

    The last token sampled is never processed: its position stays reserved and empty.
    """
    scheduler = lesson(1, 10)
    one = request(1, 3, max_tokens=2)
    scheduler.add(one, 0.0)
    plan = scheduler.schedule(0.0)
    assert len(scheduler.blocks.table(1)) == 5
    scheduler.update(plan, answer(plan))
    assert (one.num_computed_tokens, one.remaining_tokens) == (3, 1)
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, answer(plan))
    assert (one.num_computed_tokens, len(one.output_token_ids)) == (4, 2)
    assert scheduler.blocks.num_free == 10


def test_littles_law_holds_on_a_finite_trace() -> None:
    result = simulate(lesson(2, 30), [1, 4, 1, 1])
    finished = result["finished"].values()
    area = sum(sum(end > t for end in finished) for t in range(result["steps"]))
    mean_number, mean_time = area / result["steps"], sum(finished) / 4
    assert mean_number == pytest.approx(4 / result["steps"] * mean_time)


# --- what the lesson refuses ----------------------------------------------------------------------


def test_an_impossible_request_is_refused() -> None:
    with pytest.raises(RequestTooLongError):
        lesson(2, 10).add(request(1, 3, max_tokens=8), 0.0)
    with pytest.raises(RequestTooLongError):
        lesson(2, 10, "static").add(request(1, 3, max_tokens=8), 0.0)


def test_a_duplicate_key_is_refused_while_the_first_one_lives() -> None:
    scheduler = lesson(2, 30)
    scheduler.add(request(1, 2), 0.0)
    with pytest.raises(InvalidRequestError, match="taken"):
        scheduler.add(request(1, 2), 0.0)
    scheduler.check_integrity()


@pytest.mark.parametrize("bad", [True, 0, -1, 2.0])
def test_counts_that_are_no_positive_integers_are_refused(bad: Any) -> None:
    one = Request(1, "r", [5, 6], SamplingParams(max_tokens=bad), frozenset(), 0.0)
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        lesson(2, 30).add(one, 0.0)
    with pytest.raises(InvalidRequestError, match="prompt length"):
        lesson(2, 30).add(Request(1, "r", [], SamplingParams(), frozenset(), 0.0), 0.0)
    with pytest.raises(ValueError, match="max_num_seqs"):
        lesson(bad, 30)
