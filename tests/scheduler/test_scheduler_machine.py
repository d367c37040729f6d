"""Any order of arrivals, cancels, handoffs, failures and steps, with samples that split off, under
every policy: blocks are conserved, budgets kept, no token is lost or repeated, nobody starves, and
everything ends.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tasuki.errors import RequestTooLongError
from tasuki.kv.block_pool import BlockState
from tasuki.messages import FinishReason, SamplingParams
from tasuki.request import Request, RequestStatus, sample_key
from tasuki.scheduler.output import ModelRunnerOutput, SchedulerOutput
from tasuki.scheduler.scheduler import Scheduler
from tests.scheduler.rig import check, make

BLOCKS, BLOCK_SIZE = 12, 4
policies = st.fixed_dictionaries(
    {
        "prefix_caching": st.booleans(),
        "step_order": st.sampled_from(["decode_first", "prefill_first"]),
        "admission": st.sampled_from(["optimistic", "reserve_max"]),
        "batching": st.sampled_from(["continuous", "static", "dynamic"]),
        "queue_order": st.sampled_from(["fcfs", "priority"]),
        "max_bypasses": st.sampled_from([0, 2]),
        "max_num_seqs": st.sampled_from([1, 3, 8]),
        "max_num_batched_tokens": st.sampled_from([1, 5, 16]),
        "long_prefill_token_threshold": st.sampled_from([0, 3]),
    }
)


Drawn = tuple[int, int, int, int, str, int]


def next_tokens(one: Request) -> list[int]:
    """What each of its next choices would be: samples differ from their first token on."""
    return [next_token(known(one)) + index for index in range(one.num_choices)]


def next_token(known: list[int]) -> int:
    """What the model would say: a function of all tokens before, so that a lost one shows."""
    value = len(known)
    for token in known:
        value = (value * 31 + token) % 9973
    return 10 + value


def expected(prompt: list[int], count: int, sample_index: int) -> list[int]:
    known = list(prompt)
    for place in range(count):
        known.append(next_token(known) + (0 if place else sample_index))
    return known[len(prompt) :]


class SchedulerMachine(RuleBasedStateMachine):
    """The model of KV: what token sequence each block's positions were written for."""

    scheduler: Scheduler

    @initialize(policy=policies)
    def start(self, policy: dict[str, Any]) -> None:
        self.scheduler = make(BLOCKS, block_size=BLOCK_SIZE, batch_window=2.0, **policy)
        self.now = 0.0
        self.keys = 0
        self.plan: SchedulerOutput | None = None
        self.requests: dict[int, Request] = {}
        self.parked: dict[int, Request] = {}  # their blocks are reserved
        self.quarantined: set[int] = set()
        self.written: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, offset) -> tokens up to

    def new(self, prompt: list[int], max_tokens: int, priority: int, salt: str, n: int) -> Request:
        self.keys += 1
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=n)
        one = Request(
            self.keys, "same", prompt, sampling, frozenset(), self.now,
            priority=priority, cache_salt=salt,
        )  # fmt: skip
        self.requests[one.key] = one
        return one

    requests_drawn = st.tuples(
        st.integers(1, 20),  # prompt length
        st.integers(0, 2),  # which of three texts it begins like
        st.integers(1, 12),
        st.integers(-2, 2),
        st.sampled_from(["", "a"]),
        st.sampled_from([1, 1, 2, 4]),  # samples
    )

    def draw(self, drawn: Drawn) -> Request:
        length, text, max_tokens, priority, salt, n = drawn
        prompt = [text * 100 + i // 6 for i in range(length)]
        return self.new(prompt, max_tokens, priority, salt, n)

    def tell_first_tokens(self, one: Request) -> None:
        first, *others = next_tokens(one)
        one.append(first, 2048)
        self.requests |= {sample.key: sample for sample in one.split(others, 2048)}

    # --- events ---------------------------------------------------------------------------------

    @rule(drawn=requests_drawn)
    def arrive(self, drawn: Drawn) -> None:
        one = self.draw(drawn)
        try:
            self.scheduler.add(one, self.now)
        except RequestTooLongError:
            del self.requests[one.key]

    @rule(drawn=requests_drawn)
    def reserve(self, drawn: Drawn) -> None:
        """A handoff begins: blocks are promised to a prompt computed elsewhere."""
        one = self.draw(drawn)
        blocks, scheduler = self.scheduler.blocks, self.scheduler
        del self.requests[one.key]
        try:
            scheduler.require_possible(one.prompt_len, 0, one.sampling.max_tokens)
        except RequestTooLongError:
            return
        known = blocks.match(one)
        if not known.copies_last and scheduler.reserve(one, known):
            one.status = RequestStatus.PARKED
            one.num_computed_tokens = known.num_tokens
            self.parked[one.key] = self.requests[one.key] = one
        else:
            scheduler.unreserve(one.key)

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        one = self.parked.pop(data.draw(st.sampled_from(sorted(self.parked))))
        self.write(
            one, list(self.scheduler.blocks.table(one.key)), one.num_computed_tokens, one.prompt_len
        )
        self.scheduler.blocks.commit(one.key)
        one.num_computed_tokens = one.prompt_len
        self.tell_first_tokens(one)
        self.scheduler.blocks.publish(one)
        if one.finish_reason is not None:
            self.scheduler.unreserve(one.key)
            one.status = RequestStatus.FINISHED
        else:
            self.scheduler.adopt(one)

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """The handoff fails: some blocks arrived, some may still be written by the link, and first
        tokens may have come.
        """
        one = self.parked.pop(data.draw(st.sampled_from(sorted(self.parked))))
        blocks = self.scheduler.blocks
        table = list(blocks.table(one.key))
        cached = one.num_computed_tokens // BLOCK_SIZE
        last = one.prompt_len // BLOCK_SIZE
        keep = data.draw(st.integers(cached, max(cached, last)))
        in_flight = data.draw(st.sets(st.sampled_from(table[keep:]))) if table[keep:] else set()
        if data.draw(st.booleans()):
            self.tell_first_tokens(one)
        arrived = min(keep * BLOCK_SIZE, one.prompt_len, one.num_tokens - 1)
        self.write(one, table, one.num_computed_tokens, keep * BLOCK_SIZE)
        blocks.abandon(one.key, keep, frozenset(in_flight))
        self.quarantined |= in_flight
        one.num_computed_tokens = max(arrived, 0)
        if one.finish_reason is not None and not one.parked_samples:
            self.scheduler.unreserve(one.key)
            one.status = RequestStatus.FINISHED
        elif blocks.table(one.key):
            self.scheduler.adopt(one)
        elif one.finish_reason is None:
            self.scheduler.add(one, self.now)
        else:
            self.scheduler.unreserve(one.key)
            one.status = RequestStatus.FINISHED
            self.scheduler.add(one.heir(), self.now)

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def start_anew(self, data: st.DataObject) -> None:
        """The handoff goes to the next candidate; the link may still write into some blocks."""
        one = self.parked[data.draw(st.sampled_from(sorted(self.parked)))]
        blocks = self.scheduler.blocks
        fresh = list(blocks.table(one.key))[one.num_computed_tokens // BLOCK_SIZE :]
        in_flight = data.draw(st.sets(st.sampled_from(fresh))) if fresh else set()
        enough = len(in_flight) <= blocks.num_free
        assert blocks.replace(one.key, frozenset(in_flight)) == enough
        if enough:
            self.quarantined |= in_flight
            assert not in_flight & set(blocks.table(one.key))

    @precondition(lambda self: self.quarantined)
    @rule()
    def release(self) -> None:
        self.scheduler.blocks.release(self.quarantined)
        self.quarantined.clear()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Of a request with all of its samples."""
        key = self.requests[data.draw(st.sampled_from(sorted(self.requests)))].group_key
        for one in [one for one in self.requests.values() if one.group_key == key]:
            del self.requests[one.key]
            self.cancel_one(one)

    def cancel_one(self, one: Request) -> None:
        if self.parked.pop(one.key, None) is not None:
            in_flight = frozenset(self.scheduler.blocks.table(one.key)[-1:])
            if self.scheduler.blocks.pool.state(next(iter(in_flight))) is BlockState.RESERVED:
                self.quarantined |= in_flight
            else:
                in_flight = frozenset()
            self.scheduler.unreserve(one.key, in_flight)
            one.status = RequestStatus.FINISHED
        elif one.status is RequestStatus.PARKED:
            one.status = RequestStatus.FINISHED
        else:
            self.scheduler.cancel(one, FinishReason.CANCELLED)

    @rule()
    def reset(self) -> None:
        self.scheduler.blocks.reset_prefix_cache()

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self) -> None:
        self.plan = self.scheduler.schedule(self.now)
        check(self.scheduler, self.plan)
        for copy in self.plan.copies:
            for offset in range(BLOCK_SIZE):
                self.written.pop((copy.target, offset), None)
                if (copy.source, offset) in self.written:
                    self.written[copy.target, offset] = self.written[copy.source, offset]

    @precondition(lambda self: self.plan is not None)
    @rule()
    def finish_step(self) -> None:
        assert self.plan is not None
        plan, self.plan = self.plan, None
        sampled = {}
        for entry in plan.requests:
            one = self.scheduler._live.get(entry.key)
            if one is None:
                continue  # cancelled meanwhile; its writes hurt nobody: its blocks are held
            end = entry.num_computed_tokens + len(entry.token_ids)
            assert entry.token_ids == known(one)[entry.num_computed_tokens : end]
            self.write(one, list(entry.block_ids), entry.num_computed_tokens, end)
            self.require_context(one, list(entry.block_ids), end)
            assert entry.samples == (end == one.num_tokens)
            if entry.samples:
                for index, token_id in enumerate(next_tokens(one)):
                    sampled[sample_key(one.key, index)] = token_id
        for update in self.scheduler.update(plan, ModelRunnerOutput(plan.step, sampled)):
            self.requests[update.request.key] = update.request  # perhaps a sample that split off

    # --- what KV would hold -------------------------------------------------------------------

    def write(self, one: Request, table: list[int], start: int, end: int) -> None:
        tokens = known(one)
        for position in range(start, min(end, len(tokens))):
            place = (table[position // BLOCK_SIZE], position % BLOCK_SIZE)
            self.written[place] = tuple(tokens[: position + 1])

    def require_context(self, one: Request, table: list[int], end: int) -> None:
        """Everything before `end` that attention reads was written for these very tokens."""
        tokens = known(one)
        for position in range(end):
            place = (table[position // BLOCK_SIZE], position % BLOCK_SIZE)
            assert self.written.get(place) == tuple(tokens[: position + 1]), position

    # --- what always holds -----------------------------------------------------------------------

    @invariant()
    def tokens_are_those_of_the_model(self) -> None:
        for one in getattr(self, "requests", {}).values():
            count = len(one.output_token_ids)
            assert one.output_token_ids == expected(one.prompt_token_ids, count, one.sample_index)
            assert len(one.output_token_ids) <= one.sampling.max_tokens

    @invariant()
    def structures_agree(self) -> None:
        if getattr(self, "plan", 0) is None:
            self.scheduler.check_integrity()
            counts = self.scheduler.blocks.pool.counts()
            assert sum(counts.values()) == BLOCKS
            live = [*self.scheduler.live_keys(), *self.parked]
            assert self.scheduler.blocks.leaked(live) == []

    def teardown(self) -> None:
        """With no more events every admitted request ends, within a bound."""
        if not hasattr(self, "scheduler"):
            return
        if self.plan is not None:
            self.finish_step()
        while self.parked:
            _, one = self.parked.popitem()
            self.scheduler.unreserve(one.key)
            del self.requests[one.key]
        self.scheduler.blocks.release(self.quarantined)
        bound = 10 + sum(
            2 * (one.prompt_len + one.sampling.max_tokens) for one in self.requests.values()
        )
        for _ in range(20 * bound):
            if not self.scheduler.has_work:
                break
            self.schedule()
            self.finish_step()
            self.now += 1.0
        assert not self.scheduler.has_work, "a request never ends"
        self.scheduler.check_integrity()
        for one in self.requests.values():
            assert one.finish_reason is FinishReason.LENGTH
            assert len(one.output_token_ids) == one.sampling.max_tokens
        assert self.scheduler.blocks.num_free == BLOCKS
        assert self.scheduler.blocks.remembered_keys == set()


def known(one: Request) -> list[int]:
    return one.prompt_token_ids + one.output_token_ids


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
