"""Several samples of one prompt: computed once, shared block by block, and then on their own."""

from __future__ import annotations

import pytest

from tasuki.messages import FinishReason, SamplingParams
from tasuki.request import Request, RequestStatus, sample_key
from tasuki.scheduler.scheduler import Scheduler
from tests.scheduler.rig import answer, drain, make, request, step


def sampled(key: int, prompt_len: int, n: int, max_tokens: int = 6) -> Request:
    one = request(key, prompt_len)
    one.sampling = SamplingParams(max_tokens=max_tokens, n=n, temperature=1.0)
    return one


def computed(scheduler: Scheduler, one: Request, first_token: int = 7) -> list[Request]:
    """All samples, once the prompt is computed and their first tokens are chosen."""
    scheduler.add(one, 0.0)
    step(scheduler, first_token)
    return [one, *one.other_samples]


def test_the_prompt_is_computed_once_and_its_blocks_are_shared() -> None:
    scheduler = make()
    samples = computed(scheduler, sampled(1, 10, n=4))
    assert [one.output_token_ids for one in samples] == [[7], [8], [9], [10]]
    assert [one.sample_index for one in samples] == [0, 1, 2, 3]
    plan = scheduler.schedule(0.0)
    tables = [list(scheduler.blocks.table(one.key)) for one in samples]
    assert all(table[:2] == tables[0][:2] for table in tables)
    assert len({table[2] for table in tables}) == 4
    assert {(copy.source, copy.target) for copy in plan.copies} == {
        (tables[0][2], table[2]) for table in tables[1:]
    }
    assert [len(entry.token_ids) for entry in plan.requests] == [1] * 4
    assert sorted(entry.sample_index for entry in plan.requests) == [0, 1, 2, 3]
    assert all(entry.num_choices == 1 for entry in plan.requests)
    assert scheduler.blocks.pool.num_blocks - scheduler.blocks.num_free == 2 + 4
    scheduler.update(plan, answer(plan))
    drain(scheduler)
    assert sum(one.computed_prompt_tokens for one in samples) == 10
    assert all(len(one.output_token_ids) == 6 for one in samples)
    assert scheduler.blocks.num_free == scheduler.blocks.pool.num_blocks


def test_updates_tell_each_sample_from_its_first_token_on() -> None:
    scheduler = make()
    one = sampled(1, 10, n=3, max_tokens=2)
    scheduler.add(one, 0.0)
    told: dict[int, list[int]] = {}
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        for update in scheduler.update(plan, answer(plan, 20)):
            assert update.request.group_key == 1
            told.setdefault(update.request.sample_index, []).extend(update.token_ids)
    assert told == {0: [20, 20], 1: [21, 20], 2: [22, 20]}
    assert {sample_key(1, index) for index in range(3)} == {
        sample.key for sample in (one, *one.other_samples)
    }


def test_a_first_sample_that_ends_at_once_leaves_its_blocks_to_the_others() -> None:
    scheduler = make()
    first, second, third = computed(scheduler, sampled(1, 10, n=3), first_token=2)  # EOS is 2
    assert first.finish_reason is FinishReason.STOP
    assert scheduler.blocks.table(1) == ()
    assert [one.status for one in (second, third)] == [RequestStatus.RUNNING] * 2
    drain(scheduler)
    assert second.computed_prompt_tokens == third.computed_prompt_tokens == 0
    assert scheduler.blocks.num_free == scheduler.blocks.pool.num_blocks


def test_another_sample_that_ends_at_once_never_holds_a_block() -> None:
    scheduler = make()
    samples = computed(scheduler, sampled(1, 8, n=3), first_token=1)
    assert [one.finish_reason for one in samples] == [None, FinishReason.STOP, None]
    assert len(scheduler.running) == 2
    assert scheduler.blocks.table(samples[1].key) == ()


def test_samples_of_one_token_end_with_their_prompt() -> None:
    scheduler = make()
    samples = computed(scheduler, sampled(1, 10, n=3, max_tokens=1))
    assert [one.finish_reason for one in samples] == [FinishReason.LENGTH] * 3
    assert not scheduler.has_work
    assert scheduler.blocks.num_free == scheduler.blocks.pool.num_blocks


def test_more_samples_than_seats_wait_for_their_turn_in_order() -> None:
    scheduler = make(max_num_seqs=2)
    late = request(9, 4)
    samples = computed(scheduler, sampled(1, 10, n=5, max_tokens=3))
    scheduler.add(late, 0.0)
    assert [one.sample_index for one in scheduler.waiting][:3] == [1, 2, 3]
    drain(scheduler)
    assert all(len(one.output_token_ids) == 3 for one in samples)
    assert len(late.output_token_ids) == 4


def test_with_a_prefix_cache_those_that_waited_find_the_prompt_again() -> None:
    scheduler = make(max_num_seqs=1, prefix_caching=True)
    samples = computed(scheduler, sampled(1, 10, n=3, max_tokens=3))
    drain(scheduler)
    assert [one.computed_prompt_tokens for one in samples] == [10, 2, 2]


@pytest.mark.parametrize("num_blocks", [8, 9, 14])
def test_reserve_max_preempts_no_sample(num_blocks: int) -> None:
    scheduler = make(num_blocks=num_blocks, admission="reserve_max")
    samples = computed(scheduler, sampled(1, 10, n=4, max_tokens=20))
    drain(scheduler)
    assert scheduler.preemptions == 0
    assert all(len(one.output_token_ids) == 20 for one in samples)


def test_a_preempted_sample_comes_back_on_its_own() -> None:
    scheduler = make(num_blocks=10)
    samples = computed(scheduler, sampled(1, 10, n=3, max_tokens=25))
    drain(scheduler)
    assert scheduler.preemptions > 0
    assert all(len(one.output_token_ids) == 25 for one in samples)
    assert samples[0].preemptions == 0  # the latest gives way


def test_a_request_preempted_before_its_first_token_still_splits() -> None:
    scheduler = make(num_blocks=6, max_num_batched_tokens=8)
    old = request(1, 7, max_tokens=12)
    scheduler.add(old, 0.0)
    step(scheduler)
    one = sampled(2, 15, n=2, max_tokens=3)
    scheduler.add(one, 0.0)
    drain(scheduler)
    assert [len(sample.output_token_ids) for sample in (one, *one.other_samples)] == [3, 3]
    assert [sample.output_token_ids[0] for sample in (one, *one.other_samples)] == [7, 8]


def test_a_handoff_brings_first_tokens_and_all_go_on_from_its_blocks() -> None:
    scheduler = make()
    one = sampled(1, 10, n=3)
    blocks = scheduler.blocks
    assert scheduler.reserve(one, blocks.match(one))
    blocks.commit(1)
    one.num_computed_tokens = 10
    one.append(2, 2048)
    assert len(one.split([5, 6], 2048)) == 2
    scheduler.adopt(one)
    scheduler.check_integrity()
    assert one.status is RequestStatus.FINISHED
    assert scheduler.running == one.other_samples[::-1]
    drain(scheduler)
    assert [sample.output_token_ids[0] for sample in one.other_samples] == [5, 6]
    assert all(sample.computed_prompt_tokens == 0 for sample in one.other_samples)


@pytest.mark.parametrize("first_token", [7, 2])
def test_a_handoff_that_fails_after_first_tokens_computes_the_rest_once(first_token: int) -> None:
    scheduler = make()
    one = sampled(1, 10, n=3)
    blocks = scheduler.blocks
    assert scheduler.reserve(one, blocks.match(one))
    one.append(first_token, 2048)
    one.split([5, 6], 2048)
    blocks.abandon(1, 1, frozenset())  # one block of four tokens arrived
    one.num_computed_tokens = 4
    scheduler.adopt(one)
    scheduler.check_integrity()
    samples = [one, *one.other_samples]
    assert step(scheduler) == {samples[first_token == 2].key: 10 - 4 + 1}
    drain(scheduler)
    assert sum(sample.computed_prompt_tokens for sample in samples) == 6
    assert [len(sample.output_token_ids) for sample in samples] == [
        1 if first_token == 2 else 6,
        6,
        6,
    ]
    assert blocks.num_free == blocks.pool.num_blocks
