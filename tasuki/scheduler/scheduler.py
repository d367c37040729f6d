"""Batching with a token budget: which tokens of which requests the next step computes.

Pure: takes `now`, returns data. There are no phases: a request is scheduled for as many of its
uncomputed known tokens as the budget allows, and a token is sampled when none is left.
 1. Who holds blocks is running, and running requests go first, one token each before one gets a
    chunk. (`prefill_first` turns that round, for comparison.)
 2. Waiting requests are admitted in order while budget is left and nothing was preempted in this
    step. The head of the line blocks, or may be passed a bounded number of times.
 3. Blocks are allocated before a token is scheduled; what is cached of a request's beginning is
    shared instead of computed.
 4. When growth finds no block, somebody gives way: the latest, or the least important and latest.
    Its blocks are freed, its progress is zero, and it starts over from the head of the queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tasuki.errors import InvalidRequestError
from tasuki.kv.block_pool import BlockState
from tasuki.kv.manager import KVCacheManager, Prefix
from tasuki.messages import FinishReason
from tasuki.request import Request, RequestStatus
from tasuki.scheduler.config import Admission, SchedulerConfig, StepOrder
from tasuki.scheduler.limits import most_positions, positions_to_hold, require_possible
from tasuki.scheduler.membership import Membership
from tasuki.scheduler.output import (
    ModelRunnerOutput,
    RequestUpdate,
    ScheduledRequest,
    SchedulerOutput,
)
from tasuki.scheduler.results import take_result
from tasuki.scheduler.step_plan import StepPlan
from tasuki.scheduler.waiting_queue import WaitingQueue


class Scheduler:
    """Owns the order of requests and, through `blocks`, the blocks they hold."""

    def __init__(self, config: SchedulerConfig, blocks: KVCacheManager) -> None:
        self.config = config
        self.blocks = blocks
        self.waiting = WaitingQueue(config)  # hold no blocks
        self.running: list[Request] = []  # hold blocks, oldest admission first
        self.reserved: set[int] = set()  # hold blocks, and run once a handoff is over: keys
        self.membership = Membership(config)
        self.preemptions = 0
        self.stale_results = 0
        self.prefix_queries = 0  # tokens of admitted requests that were looked up in the cache
        self.prefix_hits = 0  # tokens of them that were found
        self._step = 0
        self._in_flight: SchedulerOutput | None = None
        self._live: dict[int, Request] = {}  # waiting or running
        self._retired: set[int] = set()  # ended while in flight: blocks come home with the result
        self._block_size = blocks.layout.block_size

    # --- requests in and out ---------------------------------------------------------------

    def require_possible(self, prompt_len: int, output_len: int, max_tokens: int) -> None:
        """Raise for a request that no patience could ever finish here."""
        require_possible(self.config, self.blocks, prompt_len, output_len, max_tokens)

    def add(self, request: Request, now: float) -> None:
        """Queue a request that holds no blocks. Raises InvalidRequestError, RequestTooLongError."""
        self.require_possible(
            request.prompt_len, len(request.output_token_ids), request.sampling.max_tokens
        )
        self._enter(request)
        self.reserved.discard(request.key)  # a handoff failed, and left it no block
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.queued = now
        self.waiting.push(request)

    def reserve(self, request: Request, known: Prefix) -> bool:
        """Promise a handoff blocks for the prompt and the first generated token, those of `known`
        pinned. False when there is no room, or a preempted request waits for it.

        Ends with `adopt` or `unreserve`; until then the request's progress is the handoff's.
        """
        if self.has_preempted or self._holders >= self.config.max_running:
            return False
        needed = positions_to_hold(self.config, request, request.prompt_len + 1)
        # room for each holder to grow, and for the largest to finish: no preemption for its sake
        headroom = max(self._holders, max(map(self._blocks_to_finish, self.running), default=0))
        state = BlockState.RESERVED
        if not self.blocks.begin(request, known, needed, headroom=headroom, state=state):
            return False
        self.reserved.add(request.key)
        self._note_prefix(request, known)
        return True

    def unreserve(self, key: int, in_flight: frozenset[int] = frozenset()) -> None:
        """The request of a reservation is over. Blocks that the link may still write into,
        `in_flight`, are quarantined. Forgets what `match` looked up, reservation or not.
        """
        self.reserved.discard(key)
        self.blocks.free(key, in_flight)

    def _blocks_to_finish(self, request: Request) -> int:
        most = most_positions(self.config, request.prompt_len, request.sampling.max_tokens)
        return self.blocks.layout.blocks_for(most) - len(self.blocks.table(request.key))

    @property
    def _holders(self) -> int:
        return len(self.running) + len(self.reserved)

    def adopt(self, request: Request) -> None:
        """Take a request that already holds blocks: it goes ahead of everything that waits. It may
        be over: then its other samples go on from its blocks.
        """
        assert self.blocks.table(request.key)
        self.reserved.discard(request.key)
        self._enter(request)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self._branch(request)
        if request.finish_reason is not None:
            self.cancel(request, request.finish_reason)

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """Add a request whose first `num_tokens` tokens are those that `parent` has computed: it
        shares the parent's blocks, or, if there is no block or no room for it now, waits at the
        head of the queue.
        """
        assert parent.status is RequestStatus.RUNNING
        assert num_tokens <= parent.num_computed_tokens
        self._enter(child)
        child.queued = parent.queued
        needed = positions_to_hold(self.config, child, num_tokens)
        has_seat = self._holders < self.config.max_running
        if has_seat and self.blocks.fork(parent, child, num_tokens, needed):
            child.num_computed_tokens = num_tokens
            child.status = RequestStatus.RUNNING
            self.running.append(child)
        else:
            child.status = RequestStatus.WAITING
            self.waiting.push_front(child)

    def _branch(self, request: Request) -> None:
        """Let the samples of a request go their own ways as soon as their prompt is computed; where
        the request is over before, one of them takes its place.
        """
        parked = request.parked_samples
        shared = min(request.num_computed_tokens, request.prompt_len)
        if not parked or (shared < request.prompt_len and request.finish_reason is None):
            return
        if shared < request.prompt_len:
            parked = [request.heir()]
        for sample in reversed(parked):  # those that find no room queue up in order
            self.fork(request, sample, shared)

    def _enter(self, request: Request) -> None:
        assert request.status is not RequestStatus.FINISHED
        if request.key in self._live:
            raise InvalidRequestError(f"key {request.key} is taken by a live request")
        self._live[request.key] = request

    def cancel(self, request: Request, reason: FinishReason) -> None:
        """End a request now. If a step is computing it, its blocks stay until that step ends."""
        if request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        elif request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            return
        self._end(request, reason)

    def release(self, request: Request) -> None:
        """Free the blocks of a finished request that held on to them."""
        assert request.holds_blocks
        assert request.status is RequestStatus.FINISHED
        request.holds_blocks = False
        self._let_go(request)

    def set_token_budget(self, max_num_batched_tokens: int) -> None:
        """Change the budget of later steps. With nothing running only."""
        assert not self._live
        self.config = replace(self.config, max_num_batched_tokens=max_num_batched_tokens)
        self.membership = Membership(self.config)

    def is_in_flight(self, key: int) -> bool:
        """Whether the step being computed now touches the blocks of this request."""
        plan = self._in_flight
        return plan is not None and any(entry.key == key for entry in plan.requests)

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def has_preempted(self) -> bool:
        """Whether a request that lost its blocks waits to get them back."""
        return self.waiting.num_resuming > 0

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are known and not computed."""
        return sum(max(0, r.prompt_len - r.num_computed_tokens) for r in self._live.values())

    # --- one step -----------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan the next step. Every plan must come back through `update` before the next one."""
        assert self._in_flight is None, "the previous step has not been updated"
        self._step += 1
        step = StepPlan(self.config)
        if self.config.step_order is StepOrder.PREFILL_FIRST:
            self._run(step, [r for r in self.running if r.remaining_tokens > 1], now)
            self._admit(step, now)
            self._run(step, [r for r in self.running if r.key not in step.scheduled], now)
        else:
            self._run(step, self.running.copy(), now)
            self._admit(step, now)
        if step.scheduled:
            self.membership.count(len(self.running), len(step.scheduled))
        output = SchedulerOutput(
            self._step, tuple(step.scheduled.values()), self.blocks.take_copies()
        )
        self._in_flight = output
        return output

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestUpdate]:
        """Take the result of the step in flight; anything else is counted and dropped."""
        if plan is not self._in_flight or result.step != plan.step:
            self.stale_results += 1
            return []
        self._in_flight = None
        self.blocks.copied(plan.copies)
        updates: list[RequestUpdate] = []
        ended = False
        for entry in plan.requests:
            request = self._live.get(entry.key)
            if request is None:  # ended meanwhile
                self.stale_results += 1
                continue
            updates += self._advance(request, entry, result)
            ended = ended or request.finish_reason is not None
        while self._retired:
            self.blocks.free(self._retired.pop())
        if ended:
            self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]
        return updates

    # --- parts of a step ------------------------------------------------------------------------

    def _run(self, step: StepPlan, requests: Sequence[Request], now: float) -> None:
        """Schedule requests that hold blocks: a token for each before one gets a chunk."""
        behind, grow = len(requests), self.blocks.grow
        for request in requests:
            behind -= 1
            if step.budget <= 0:
                return
            if request.status is not RequestStatus.RUNNING:
                continue  # it gave way in this step
            start = request.num_computed_tokens
            count = len(request.prompt_token_ids) + len(request.output_token_ids) - start
            if count > 1:
                count = min(count, step.threshold, max(1, step.budget - behind))
            table = grow(request.key, start + count)
            if table is None:
                table = self._make_room(step, request, start + count)
            if table is not None:
                step.add(request, count, table, now)

    def _make_room(self, step: StepPlan, request: Request, num_tokens: int) -> Sequence[int] | None:
        """Allocate up to `num_tokens`; others give way, or (None) the request itself does."""
        while True:
            victim = step.next_victim(self.running)
            self._preempt(step, victim)
            if victim is request:
                return None
            table = self.blocks.grow(request.key, num_tokens)
            if table is not None:
                return table

    def _preempt(self, step: StepPlan, victim: Request) -> None:
        assert not victim.holds_blocks, "its blocks are still being sent"
        step.withdraw(victim.key)
        step.preempted = True
        self.blocks.free(victim.key)
        if self.running[-1] is victim:
            self.running.pop()
        else:
            self.running.remove(victim)
        victim.num_computed_tokens = 0
        victim.preemptions += 1
        victim.status = RequestStatus.WAITING
        self.waiting.push_front(victim)
        self.preemptions += 1

    def _admit(self, step: StepPlan, now: float) -> None:
        """Let waiting requests run, in order, as long as nobody had to give way."""
        if step.preempted or not len(self.waiting):
            return
        seats = self.membership.seats(self.waiting, len(self.running), now)
        resuming = self.waiting.num_resuming
        passed: list[Request] = []
        for index, request in enumerate(list(self.waiting)):
            resumes = index < resuming
            if step.budget <= 0 or self._holders >= self.config.max_running:
                return
            if seats <= 0 and not resumes:
                return
            if not self._seat(step, request, now):
                passed.append(request)
                if resumes or not self._may_pass(passed):
                    self.membership.close()
                    return
                continue
            for one in passed:
                one.bypasses += 1
            if not resumes:
                seats -= 1
                self.membership.joined()
            if passed and not self._may_pass(passed):
                return
        self.membership.close()  # nobody is left to be expected

    def _may_pass(self, passed: Sequence[Request]) -> bool:
        return all(request.bypasses < self.config.max_bypasses for request in passed)

    def _seat(self, step: StepPlan, request: Request, now: float) -> bool:
        """Give a waiting request its blocks and first tokens; False when there is no room."""
        known = self.blocks.match(request)
        left = request.num_tokens - known.num_tokens
        count = min(left, step.threshold, step.budget)
        needed = positions_to_hold(self.config, request, known.num_tokens + count)
        # one block of growth room for each holder, or admission only causes preemption
        optimistic = self.config.admission is Admission.OPTIMISTIC
        headroom = self._holders if optimistic else 0
        if not self.blocks.begin(request, known, needed, headroom=headroom):
            return False
        self.waiting.remove(request)
        self._note_prefix(request, known)
        request.num_computed_tokens = known.num_tokens
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        step.add(request, count, self.blocks.table(request.key), now)
        return True

    def _note_prefix(self, request: Request, known: Prefix) -> None:
        """Count what the cache had for a request that is admitted for the first time."""
        if request.preemptions or request.skips_prefix_cache or not self.blocks.prefix_caching:
            return
        request.cached_tokens = min(known.num_tokens, request.prompt_len)
        self.prefix_queries += request.num_tokens
        self.prefix_hits += known.num_tokens

    def _advance(
        self, request: Request, entry: ScheduledRequest, result: ModelRunnerOutput
    ) -> list[RequestUpdate]:
        updates = take_result(request, entry, result, self.config.max_model_len)
        if entry.num_computed_tokens % self._block_size + len(entry.token_ids) >= self._block_size:
            self.blocks.publish(request)
        if request.other_samples:
            self._branch(request)
        if request.finish_reason is not None:
            self._end(request, request.finish_reason)
        return updates

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._live[request.key]
        if not request.holds_blocks:  # else a handoff still sends them; its owner frees them
            self._let_go(request)

    def _let_go(self, request: Request) -> None:
        if self.is_in_flight(request.key):
            self._retired.add(request.key)
        else:
            self.blocks.free(request.key)

    def live_keys(self) -> Iterator[int]:
        """Keys that may hold blocks here."""
        yield from (request.key for request in self.running)
        yield from self._retired

    def check_integrity(self) -> None:
        """Assert what must always hold between steps."""
        self.blocks.check_integrity()
        self.waiting.check_integrity()
        assert all(r.status is RequestStatus.WAITING for r in self.waiting)
        assert all(r.status is RequestStatus.RUNNING for r in self.running)
        queued = [request.key for request in (*self.waiting, *self.running)]
        assert sorted(queued) == sorted(self._live), "a live request is in no list, or in two"
        assert not self.reserved & self._live.keys(), "reserved, and scheduled already"
        assert self._holders <= self.config.max_running
        assert not any(self.blocks.table(r.key) for r in self.waiting), "a waiting one holds blocks"
        for request in self.running:
            assert self.blocks.covers(request.key) >= request.num_computed_tokens
            assert request.remaining_tokens > 0, "nothing left to compute, yet running"
        assert not self._retired or self._in_flight is not None
