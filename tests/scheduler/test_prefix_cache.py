"""What is cached of a request's beginning is shared instead of computed, and evicted in time."""

from __future__ import annotations

from tasuki.kv.block_pool import BlockState
from tasuki.messages import FinishReason, SamplingParams
from tasuki.request import Request
from tests.scheduler.rig import answer, drain, make, request, step


def conversation(key: int, token_ids: list[int], max_tokens: int = 1) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request(key, f"r{key}", token_ids, sampling, frozenset(), 0.0)


def test_full_blocks_are_shared_and_the_rest_is_computed() -> None:
    scheduler = make(prefix_caching=True)
    scheduler.add(request(1, 10, max_tokens=9), 0.0)
    step(scheduler)
    scheduler.add(request(2, 10, max_tokens=9), 0.0)
    assert step(scheduler) == {1: 1, 2: 2}
    assert list(scheduler.blocks.table(1))[:2] == list(scheduler.blocks.table(2))[:2]
    assert scheduler.blocks.pool.holders(scheduler.blocks.table(1)[0]) == 2
    drain(scheduler)


def test_a_full_hit_computes_one_token_in_a_block_of_its_own() -> None:
    """The block that the last token is written into is copied, not shared."""
    scheduler = make(prefix_caching=True)
    scheduler.add(request(1, 8, max_tokens=1), 0.0)
    drain(scheduler)
    scheduler.add(request(2, 8, max_tokens=3), 0.0)
    plan = scheduler.schedule(0.0)
    (entry,) = plan.requests
    assert (entry.num_computed_tokens, len(entry.token_ids)) == (7, 1)
    (copy,) = plan.copies
    assert copy.target == entry.block_ids[1]
    assert copy.source not in entry.block_ids
    assert scheduler.blocks.pool.state(copy.source) is BlockState.IN_USE  # until it was copied
    scheduler.update(plan, answer(plan))
    assert scheduler.blocks.pool.state(copy.source) is BlockState.CACHED
    scheduler.check_integrity()
    drain(scheduler)


def test_a_request_cancelled_before_its_copy_was_made_leaves_nothing() -> None:
    scheduler = make(prefix_caching=True)
    scheduler.add(request(1, 8, max_tokens=1), 0.0)
    drain(scheduler)
    two = request(2, 8)
    scheduler.add(two, 0.0)
    plan = scheduler.schedule(0.0)
    scheduler.cancel(two, FinishReason.CANCELLED)
    scheduler.update(plan, answer(plan))
    scheduler.check_integrity()
    assert scheduler.blocks.num_free == 64


def test_output_tokens_are_cached_for_the_next_turn() -> None:
    scheduler = make(prefix_caching=True)
    first = conversation(1, [1, 2, 3, 4, 5], max_tokens=8)
    scheduler.add(first, 0.0)
    drain(scheduler)
    second = conversation(2, [*first.prompt_token_ids, *first.output_token_ids, 9])
    scheduler.add(second, 0.0)
    drain(scheduler)
    assert second.cached_tokens == 12  # of 13 with KV: the 13th token was never processed


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    scheduler = make(num_blocks=6, prefix_caching=True)
    first, second = conversation(1, [1] * 7, 10), conversation(2, [2] * 7, 10)
    scheduler.add(first, 0.0)
    scheduler.add(second, 0.0)
    while not scheduler.preemptions:
        step(scheduler)
    drain(scheduler)
    assert second.preemptions
    assert second.computed_prompt_tokens < 2 * 7
    assert second.cached_tokens == 0  # usage tells of others' work, not of its own
    assert len(second.output_token_ids) == 10


def test_what_was_let_go_longest_ago_is_evicted_and_the_end_of_a_prefix_first() -> None:
    scheduler = make(num_blocks=6, prefix_caching=True)
    for key, token in ((1, 1), (2, 2)):
        scheduler.add(conversation(key, [token] * 8), 0.0)
        drain(scheduler)
    assert scheduler.blocks.pool.counts()[BlockState.CACHED] == 4
    scheduler.add(conversation(3, [3] * 12), 0.0)  # needs 3 blocks; 2 are free
    drain(scheduler)
    assert scheduler.blocks.pool.evictions == 1
    again = conversation(4, [1] * 8)
    scheduler.add(again, 0.0)
    drain(scheduler)
    assert again.cached_tokens == 4  # its first block is still there


def test_a_request_that_wants_every_position_computed_uses_no_hits() -> None:
    scheduler = make(prefix_caching=True)
    scheduler.add(request(1, 12, max_tokens=1), 0.0)
    drain(scheduler)
    whole = request(2, 12, max_tokens=1, skips_prefix_cache=True)
    scheduler.add(whole, 0.0)
    assert step(scheduler) == {2: 12}
    assert whole.cached_tokens == 0


def test_nothing_is_shared_where_caching_is_off() -> None:
    scheduler = make(prefix_caching=False)
    for key in range(2):
        scheduler.add(request(key, 12, max_tokens=1), 0.0)
        assert step(scheduler) == {key: 12}
    assert scheduler.blocks.pool.counts()[BlockState.FREE] == 64
    assert scheduler.prefix_queries == 0


def test_a_reset_forgets_what_was_computed_even_by_requests_that_still_run() -> None:
    scheduler = make(prefix_caching=True)
    scheduler.add(request(1, 12, max_tokens=20), 0.0)
    step(scheduler)
    assert scheduler.blocks.reset_prefix_cache() == 3
    for _ in range(6):
        step(scheduler)  # it completes another block, which must not be found either
    late = request(2, 12, max_tokens=1)
    scheduler.add(late, 0.0)
    step(scheduler)
    assert late.cached_tokens == 0
    drain(scheduler)
    last = request(3, 12, max_tokens=1)
    scheduler.add(last, 0.0)
    drain(scheduler)
    assert last.cached_tokens == 11  # of what was computed since
    scheduler.check_integrity()


def test_hits_and_queries_are_counted_in_tokens_once_per_request() -> None:
    scheduler = make(prefix_caching=True)
    for key in range(3):
        scheduler.add(request(key, 10, max_tokens=1), 0.0)
        drain(scheduler)
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (30, 16)


# --- forks --------------------------------------------------------------------------------------


def fork_of(parent: Request, key: int, first_token: int) -> Request:
    child = request(key, parent.prompt_len, parent.sampling.max_tokens)
    child.append(first_token, 2048)
    return child


def test_a_fork_shares_full_blocks_and_copies_the_last_one() -> None:
    scheduler = make()
    parent = request(1, 10, max_tokens=6)
    scheduler.add(parent, 0.0)
    step(scheduler)
    children = [fork_of(parent, key, key) for key in (2, 3)]
    for child in children:
        scheduler.fork(parent, child, parent.prompt_len)
    plan = scheduler.schedule(0.0)
    tables = [list(scheduler.blocks.table(key)) for key in (1, 2, 3)]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    assert {(copy.source, copy.target) for copy in plan.copies} == {
        (tables[0][2], tables[1][2]),
        (tables[0][2], tables[2][2]),
    }
    assert all(len(entry.token_ids) == 1 for entry in plan.requests)
    scheduler.update(plan, answer(plan))
    scheduler.check_integrity()
    drain(scheduler)
    assert all(len(one.output_token_ids) == 6 for one in (parent, *children))
    assert scheduler.blocks.num_free == 64


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    scheduler = make()
    parent = request(1, 8, max_tokens=6)
    scheduler.add(parent, 0.0)
    step(scheduler)
    scheduler.fork(parent, fork_of(parent, 2, 5), parent.prompt_len)
    assert scheduler.schedule(0.0).copies == ()


def test_a_fork_without_room_waits_at_the_head_and_computes_its_prompt() -> None:
    scheduler = make(num_blocks=5, max_num_seqs=1)
    parent = request(1, 10, max_tokens=3)
    scheduler.add(parent, 0.0)
    scheduler.add(request(9, 4), 0.0)
    step(scheduler)
    child = fork_of(parent, 2, 5)
    scheduler.fork(parent, child, parent.prompt_len)
    assert next(iter(scheduler.waiting)) is child
    drain(scheduler)
    assert child.computed_prompt_tokens == 10
    assert len(child.output_token_ids) == 3


def test_a_fork_cancelled_before_the_next_step_leaves_the_others_alone() -> None:
    scheduler = make()
    parent = request(1, 10, max_tokens=6)
    scheduler.add(parent, 0.0)
    step(scheduler)
    child = fork_of(parent, 2, 5)
    scheduler.fork(parent, child, parent.prompt_len)
    scheduler.cancel(child, FinishReason.CANCELLED)
    scheduler.check_integrity()
    assert scheduler.schedule(0.0).copies == ()  # its block may be anybody's now
