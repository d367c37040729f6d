"""Both sides of a handoff against each other, over streams that delay, break off, never reorder."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tasuki.reasons import AbandonReason
from tasuki.transfer.handoff import Handoff, HandoffState
from tasuki.transfer.outgoing_handoff import OutgoingHandoff

TIMEOUT = 5.0


class HandoffMachine(RuleBasedStateMachine):
    """`control` and `rpc` are two streams to the decode side, `data` the channel, `back` the way
    home. A message is a tuple of an event's name and its arguments."""

    @initialize(first=st.integers(0, 3), count=st.integers(0, 9))
    def begin(self, first: int, count: int) -> None:
        self.now = 0.0
        self.first, self.count = first, count
        self.decode = Handoff(
            "h", "r", "l", first, count, now=0.0, progress_timeout=TIMEOUT, reserve_timeout=2.0
        )
        self.prefill: OutgoingHandoff | None = None
        self.control: deque[tuple[str, int, int]] = deque()
        self.rpc: deque[str] = deque()
        self.data: deque[tuple[int, int]] = deque()
        self.posts: deque[tuple[int, int]] = deque()
        self.back: deque[int] = deque()
        self.link_up = True
        self.arrived: set[int] = set()
        self.ended: HandoffState | None = None

    def see(self) -> float:
        self.now += 0.5
        return self.now

    @rule()
    @precondition(lambda self: self.decode.state is HandoffState.RESERVED)
    def dispatch(self) -> None:
        self.decode.dispatch(self.see())
        self.prefill = OutgoingHandoff(
            "h", self.first, self.count, now=self.now, progress_timeout=TIMEOUT
        )
        self.rpc.append("accept")

    @rule(count=st.integers(1, 4))
    @precondition(lambda self: self.prefill is not None)
    def offer(self, count: int) -> None:
        assert self.prefill is not None
        count = min(count, self.count - self.prefill.offered)
        if count and self.prefill.tokens is None:
            self.prefill.offer(self.first + self.prefill.offered, count)
            self.rpc.append("progress")

    @rule(count=st.integers(1, 3))
    @precondition(lambda self: self.prefill is not None and self.link_up)
    def announce(self, count: int) -> None:
        assert self.prefill is not None
        count = min(count, self.prefill.offered - self.prefill.announced)
        if count and not self.prefill.is_over:
            first = self.first + self.prefill.announced
            self.prefill.announce(count, self.see())
            self.control.append(("announce", first, count))
            self.data.append((first, count))
            self.try_commit()

    @rule()
    @precondition(lambda self: self.prefill is not None)
    def commit(self) -> None:
        assert self.prefill is not None
        if self.prefill.offered == self.count and self.prefill.tokens is None:
            self.prefill.commit(16 * self.count + 1)
            self.rpc.append("first_token")
            self.try_commit()

    def try_commit(self) -> None:
        assert self.prefill is not None
        if self.link_up and self.prefill.ready_to_commit:
            self.prefill.finish_commit(self.see())
            assert self.prefill.tokens is not None
            self.control.append(("commit", self.prefill.tokens, self.prefill.announced))

    @rule()
    @precondition(lambda self: self.prefill is not None)
    def prefill_abandons(self) -> None:
        assert self.prefill is not None
        if self.prefill.abandon(AbandonReason.CANCELLED, self.see()):
            self.control.append(("abandoned", 0, 0))

    @rule()
    @precondition(lambda self: bool(self.control))
    def deliver_control(self) -> None:
        kind, a, b = self.control.popleft()
        if kind == "announce":
            self.decode.announce(a, b, self.see())
            self.posts.append((a, b))
        elif kind == "commit":
            self.decode.commit(a, b, self.see())
        else:
            self.decode.abandon(AbandonReason.CANCELLED, self.see())

    @rule()
    @precondition(lambda self: bool(self.posts) and self.link_up)
    def deliver_data(self) -> None:
        first, count = self.posts.popleft()
        assert self.data.popleft() == (first, count), "the debts are paid in order"
        live = self.decode.receive(first, count, self.see())
        if live:
            self.arrived.update(range(first, first + count))
        self.back.append(count)

    @rule()
    @precondition(lambda self: bool(self.back))
    def deliver_back(self) -> None:
        assert self.prefill is not None
        self.prefill.receive(self.back.popleft(), self.see())

    @rule()
    @precondition(lambda self: bool(self.rpc))
    def deliver_rpc(self) -> None:
        getattr(self.decode, self.rpc.popleft())(self.see())

    @rule(keep=st.integers(0, 3))
    def cut_the_rpc(self, keep: int) -> None:
        while len(self.rpc) > keep:
            self.rpc.pop()

    @rule()
    def cut_the_link(self) -> None:
        self.link_up = False
        self.control.clear()
        self.back.clear()

    @rule(reason=st.sampled_from(list(AbandonReason)))
    def decode_abandons(self, reason: AbandonReason) -> None:
        self.decode.abandon(reason, self.see())

    @invariant()
    def holds(self) -> None:
        self.decode.check_integrity()
        run = 0
        while self.first + run in self.arrived:
            run += 1
        assert self.decode.received_run == run
        if self.ended is not None:
            assert self.decode.state is self.ended, "an end is final"
        elif self.decode.is_over:
            self.ended = self.decode.state
        if self.decode.is_committed:
            assert self.prefill is not None
            assert self.prefill.is_committed
            assert run == self.count
        timings = self.decode.timings()
        assert min(timings.transfer, timings.exposed_transfer, timings.commit_wait) >= 0.0
        if self.prefill is not None:
            self.prefill.check_integrity()

    @invariant()
    def a_pending_handoff_always_has_a_deadline(self) -> None:
        if not self.decode.is_over:
            assert self.decode.expired(self.now + TIMEOUT)

    @invariant()
    def nothing_in_flight_means_drained_or_open(self) -> None:
        quiet = not (self.data or self.back or self.posts) and self.link_up
        if self.prefill is not None and self.prefill.is_over and quiet:
            assert self.prefill.drained


TestHandoffMachine = HandoffMachine.TestCase
TestHandoffMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
