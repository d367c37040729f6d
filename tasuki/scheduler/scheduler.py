"""Continuous batching with a token budget: which tokens of which requests the next step computes.

Pure: takes `now`, returns data. There are no phases: a request is scheduled for as many of its
uncomputed known tokens as the budget allows, and a token is sampled when none is left. Running
requests go first; waiting ones are admitted in order while budget is left and nothing was
preempted in this step. Blocks are allocated before a token is scheduled. When growth finds no
block, the latest running request is preempted: its blocks are freed and it starts over at the
head of the queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from tasuki.kv.manager import KVCacheManager
from tasuki.messages import FinishReason
from tasuki.request import Request, RequestStatus
from tasuki.scheduler.config import SchedulerConfig
from tasuki.scheduler.output import (
    ModelRunnerOutput,
    RequestUpdate,
    ScheduledRequest,
    SchedulerOutput,
)


class Scheduler:
    """Owns the order of requests and, through `blocks`, the blocks they hold."""

    def __init__(self, config: SchedulerConfig, blocks: KVCacheManager) -> None:
        self.config = config
        self.blocks = blocks
        self.waiting: deque[Request] = deque()  # hold no blocks
        self.running: list[Request] = []  # hold blocks, oldest admission first
        self.preemptions = 0
        self.stale_results = 0
        self._step = 0
        self._in_flight: SchedulerOutput | None = None
        self._retired: set[int] = set()  # ended while in flight: blocks come home with the result

    # --- requests in and out ---------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request that holds no blocks."""
        assert request.status is not RequestStatus.FINISHED
        request.status = RequestStatus.WAITING
        self.waiting.append(request)

    def adopt(self, request: Request) -> None:
        """Take a request that already holds blocks: it goes ahead of everything that waits."""
        assert self.blocks.table(request.key)
        request.status = RequestStatus.RUNNING
        self.running.append(request)

    def cancel(self, request: Request, reason: FinishReason) -> None:
        """End a request now. If a step is computing it, its blocks stay until that step ends."""
        if request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        elif request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            return
        self._end(request, reason)

    def is_in_flight(self, key: int) -> bool:
        """Whether the step being computed now touches the blocks of this request."""
        plan = self._in_flight
        return plan is not None and any(entry.key == key for entry in plan.requests)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def has_preempted(self) -> bool:
        """Whether a request that lost its blocks waits to get them back."""
        return bool(self.waiting) and self.waiting[0].preemptions > 0

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are known and not computed."""
        requests = (*self.running, *self.waiting)
        return sum(max(0, r.prompt_len - r.num_computed_tokens) for r in requests)

    # --- one step -----------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan the next step. Every plan must come back through `update` before the next one."""
        assert self._in_flight is None, "the previous step has not been updated"
        self._step += 1
        budget = self.config.max_num_batched_tokens
        preempted_before = self.preemptions
        plan: list[ScheduledRequest] = []
        index = 0
        while index < len(self.running) and budget and len(plan) < self.config.max_num_seqs:
            request = self.running[index]
            behind = len(self.running) - index - 1  # each gets a token before one gets a chunk
            count = min(request.remaining_tokens, max(1, budget - behind))
            if not self._make_room(request, request.num_computed_tokens + count):
                break  # it was the last one and gave up its own blocks
            plan.append(self._plan(request, count, now))
            budget -= count
            index += 1
        if self.preemptions == preempted_before:
            plan += self._admit(budget, self.config.max_num_seqs - len(plan), now)
        output = SchedulerOutput(self._step, tuple(plan))
        self._in_flight = output
        return output

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestUpdate]:
        """Take the result of the step in flight; anything else is counted and dropped."""
        if plan is not self._in_flight or result.step != plan.step:
            self.stale_results += 1
            return []
        self._in_flight = None
        by_key = {request.key: request for request in self.running}
        updates: list[RequestUpdate] = []
        for entry in plan.requests:
            request = by_key.get(entry.key)
            if request is None:  # ended meanwhile
                self.stale_results += 1
                continue
            updates.append(self._advance(request, entry, result))
        self._free_retired()
        self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]
        return updates

    # --- parts of a step ------------------------------------------------------------------------

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Allocate up to `num_tokens`, preempting the latest; False if that was the request."""
        while not self.blocks.grow(request.key, num_tokens):
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        self.blocks.free(victim.key)
        victim.num_computed_tokens = 0
        victim.preemptions += 1
        victim.status = RequestStatus.WAITING
        self.waiting.appendleft(victim)
        self.preemptions += 1

    def _admit(self, budget: int, slots: int, now: float) -> Iterator[ScheduledRequest]:
        """Head of line first: a head that does not fit blocks the ones behind it."""
        while self.waiting and budget and slots > 0:
            if len(self.running) >= self.config.max_num_seqs:
                return
            request = self.waiting[0]
            count = min(request.remaining_tokens, budget)
            whole = self.config.allocate_whole_prompt
            needed = request.num_tokens if whole else request.num_computed_tokens + count
            # one block of growth room for each that runs, or admission only causes preemption
            if not self.blocks.grow(request.key, needed, headroom=len(self.running)):
                return
            self.waiting.popleft()
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            yield self._plan(request, count, now)
            budget -= count
            slots -= 1

    def _plan(self, request: Request, count: int, now: float) -> ScheduledRequest:
        if request.first_scheduled is None:
            request.first_scheduled = now
        start = request.num_computed_tokens
        return ScheduledRequest(
            key=request.key,
            num_computed_tokens=start,
            token_ids=request.tokens(start, count),
            block_ids=tuple(self.blocks.table(request.key)),
            samples=start + count == request.num_tokens,
            num_logits=request.logits_wanted(start, count),
            sampling=request.sampling,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=request.output_token_ids,
            eos_token_ids=request.eos_token_ids,
        )

    def _advance(
        self, request: Request, entry: ScheduledRequest, result: ModelRunnerOutput
    ) -> RequestUpdate:
        done = len(entry.token_ids)
        prompt_left = max(0, request.prompt_len - request.num_computed_tokens)
        request.computed_prompt_tokens += min(done, prompt_left)
        request.num_computed_tokens += done
        request.add_prompt_logprobs(result.prompt_logprobs.get(entry.key, ()))
        if not entry.samples:
            return RequestUpdate(request, [])
        token_id = result.token_ids[entry.key]
        request.append(token_id, self.config.max_model_len)
        if request.finish_reason is not None:
            self._end(request, request.finish_reason)
        logprob = result.logprobs.get(entry.key)
        return RequestUpdate(
            request,
            [token_id],
            [] if logprob is None else [logprob],
            request.take_prompt_logprobs(),
        )

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        if request.holds_blocks:
            return  # a handoff still sends them; its owner frees them
        if self.is_in_flight(request.key):
            self._retired.add(request.key)
        else:
            self.blocks.free(request.key)

    def release(self, request: Request) -> None:
        """Free the blocks of a finished request that held on to them."""
        assert request.holds_blocks
        assert request.status is RequestStatus.FINISHED
        request.holds_blocks = False
        self._end(request, request.finish_reason or FinishReason.CANCELLED)

    def _free_retired(self) -> None:
        for key in self._retired:
            self.blocks.free(key)
        self._retired.clear()

    def live_keys(self) -> Iterator[int]:
        """Keys that may hold blocks here."""
        yield from (request.key for request in self.running)
        yield from self._retired

    def check_integrity(self) -> None:
        """Assert what must always hold between steps."""
        self.blocks.check_integrity()
        assert all(r.status is RequestStatus.WAITING for r in self.waiting)
        assert all(r.status is RequestStatus.RUNNING for r in self.running)
        assert not any(self.blocks.table(r.key) for r in self.waiting), "a waiting one holds blocks"
        for request in self.running:
            covered = len(self.blocks.table(request.key)) * self.blocks.layout.block_size
            assert covered >= request.num_computed_tokens
            assert request.remaining_tokens > 0, "nothing left to compute, yet running"
        assert not self._retired or self._in_flight is not None
