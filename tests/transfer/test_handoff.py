from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tasuki.errors import TransferError
from tasuki.reasons import AbandonReason
from tasuki.transfer.handoff import Handoff, HandoffState
from tasuki.transfer.outgoing_handoff import OutgoingHandoff


def make(first_block: int = 2, num_blocks: int = 4, dispatched: bool = True) -> Handoff:
    handoff = Handoff(
        "h", "r", "l", first_block, num_blocks, now=0.0, progress_timeout=5.0, reserve_timeout=2.0
    )
    if dispatched:
        handoff.dispatch(1.0)
    return handoff


def test_a_whole_life() -> None:
    handoff = make()
    assert handoff.accept(2.0)
    assert handoff.progress(3.0)
    assert handoff.announce(2, 3, 4.0)
    assert handoff.state is HandoffState.TRANSFERRING
    assert handoff.posted == {2, 3, 4}
    assert handoff.receive(2, 3, 5.0)
    assert handoff.received_run == 3
    assert handoff.first_token(5.5)
    assert handoff.announce(5, 1, 6.0)
    assert handoff.commit(90, 4, 7.0)
    assert not handoff.is_committed
    assert handoff.receive(5, 1, 8.0)
    assert handoff.is_committed
    assert handoff.tokens == 90
    timings = handoff.timings()
    assert (timings.transfer, timings.exposed_transfer, timings.commit_wait) == (4.0, 2.5, 0.0)
    assert handoff.deadline == math.inf
    handoff.check_integrity()


def test_a_commit_without_every_block_is_not_committed() -> None:
    handoff = make(0, 2)
    handoff.announce(0, 1, 1.0)
    handoff.announce(1, 1, 1.0)
    handoff.receive(1, 1, 2.0)
    handoff.commit(20, 2, 3.0)
    assert not handoff.is_committed
    assert handoff.received_run == 0
    assert handoff.posted == {0}


def test_commit_wait_counts_from_what_came_last() -> None:
    handoff = make(0, 1)
    handoff.announce(0, 1, 1.0)
    handoff.receive(0, 1, 2.0)
    handoff.first_token(4.0)
    handoff.commit(3, 1, 4.5)
    timings = handoff.timings()
    assert timings.exposed_transfer == 0.0
    assert timings.commit_wait == 0.5


def test_the_first_token_may_come_after_the_commit_and_keeps_its_deadline() -> None:
    handoff = make(0, 1)
    handoff.announce(0, 1, 1.0)
    handoff.receive(0, 1, 2.0)
    handoff.commit(3, 1, 3.0)
    assert handoff.is_committed
    assert handoff.deadline == 8.0
    assert handoff.first_token(4.0)
    assert handoff.deadline == math.inf
    assert not handoff.first_token(4.5)
    timings = handoff.timings()
    assert min(timings.exposed_transfer, timings.commit_wait) >= 0.0


def test_deadlines_are_fixed_while_reserved_and_by_progress_afterwards() -> None:
    handoff = make(0, 2, dispatched=False)
    assert not handoff.expired(1.9)
    assert handoff.expired(2.0)
    events: list[Callable[[float], object]] = [
        handoff.dispatch,
        handoff.accept,
        handoff.progress,
        lambda now: handoff.announce(0, 1, now),
        lambda now: handoff.receive(0, 1, now),
    ]
    for now, event in enumerate(events):
        event(float(now))
        assert handoff.deadline == now + 5.0


@pytest.mark.parametrize(
    ("first", "count"), [(1, 1), (2, 5), (6, 1), (2, 0), (3, -1), (2, 2), (3, 1), (2, 1 << 70)]
)
def test_an_announce_out_of_range_or_twice_is_a_violation(first: int, count: int) -> None:
    handoff = make(2, 4)
    handoff.announce(3, 1, 1.0)
    with pytest.raises(TransferError, match="blocks"):
        handoff.announce(first, count, 2.0)
    assert handoff.posted == {3}
    handoff.check_integrity()


@pytest.mark.parametrize(("tokens", "blocks"), [(20, 1), (20, 3), (0, 2)])
def test_a_commit_that_does_not_add_up_is_a_violation(tokens: int, blocks: int) -> None:
    handoff = make(0, 2)
    handoff.announce(0, 2, 1.0)
    with pytest.raises(TransferError, match="Commit"):
        handoff.commit(tokens, blocks, 2.0)


def test_nothing_is_announced_or_committed_after_a_commit() -> None:
    handoff = make(0, 2)
    handoff.announce(0, 2, 1.0)
    handoff.commit(20, 2, 1.0)
    with pytest.raises(TransferError, match="after the Commit"):
        handoff.announce(0, 1, 2.0)
    with pytest.raises(TransferError, match="twice"):
        handoff.commit(20, 2, 2.0)


def test_events_before_the_dispatch_are_violations() -> None:
    handoff = make(0, 2, dispatched=False)
    with pytest.raises(TransferError, match="before the dispatch"):
        handoff.announce(0, 1, 1.0)
    handoff.dispatch(1.0)
    with pytest.raises(TransferError, match="twice"):
        handoff.dispatch(1.0)


@pytest.mark.parametrize("committed", [True, False])
def test_c4_events_after_the_end_change_nothing_and_are_counted(committed: bool) -> None:
    handoff = make(0, 1)
    handoff.announce(0, 1, 1.0)
    handoff.first_token(1.0)
    if committed:
        handoff.receive(0, 1, 1.0)
        handoff.commit(3, 1, 1.0)
    else:
        assert handoff.abandon(AbandonReason.STALLED, 2.0)
    state, run, posted = handoff.state, handoff.received_run, handoff.posted
    late = [
        handoff.dispatch(9.0),
        handoff.accept(9.0),
        handoff.progress(9.0),
        handoff.announce(0, 1, 9.0),
        handoff.receive(0, 1, 9.0),
        handoff.commit(3, 1, 9.0),
        handoff.first_token(9.0),
        handoff.abandon(AbandonReason.CANCELLED, 9.0),
    ]
    assert not any(late)
    assert handoff.stale == len(late)
    assert (handoff.state, handoff.received_run, handoff.posted) == (state, run, posted)
    assert handoff.deadline == math.inf
    handoff.check_integrity()


def test_a_handoff_of_no_blocks_commits_at_once() -> None:
    handoff = make(3, 0)
    handoff.commit(48, 0, 2.0)
    assert handoff.is_committed
    handoff.check_integrity()


def make_outgoing(first_block: int, num_blocks: int, **fields: float) -> OutgoingHandoff:
    return OutgoingHandoff(
        "h",
        first_block,
        num_blocks,
        now=0.0,
        progress_timeout=5.0,
        deadline=fields.get("deadline", math.inf),
    )


def test_outgoing_goes_through_the_same_states_and_drains_after_the_last_receipt() -> None:
    outgoing = make_outgoing(1, 3)
    states = [outgoing.state]
    assert outgoing.offer(1, 2)
    states.append(outgoing.state)  # the peer knows of nothing yet
    outgoing.announce(2, 1.0)
    states.append(outgoing.state)
    assert states == ["dispatched", "dispatched", "transferring"]
    with pytest.raises(TransferError, match="commit"):
        outgoing.commit(60)
    assert outgoing.offer(3, 1)
    assert outgoing.commit(60)
    assert not outgoing.ready_to_commit
    outgoing.announce(1, 2.0)
    assert outgoing.ready_to_commit
    outgoing.finish_commit(2.5)
    assert outgoing.is_committed
    assert not outgoing.abandon(AbandonReason.CANCELLED, 3.0)
    assert outgoing.abandon_reason is None
    assert outgoing.ended_at == 2.5
    assert outgoing.outstanding == 3
    outgoing.receive(2, 3.0)
    assert not outgoing.drained
    outgoing.receive(1, 4.0)
    assert outgoing.drained
    outgoing.check_integrity()


@pytest.mark.parametrize(("first", "count"), [(0, 1), (2, 1), (1, 4), (1, 0)])
def test_offers_are_consecutive_and_in_range(first: int, count: int) -> None:
    outgoing = make_outgoing(1, 3)
    with pytest.raises(TransferError, match="offered"):
        outgoing.offer(first, count)


def test_outgoing_abandoned_drops_late_offers_and_still_owes_what_it_announced() -> None:
    outgoing = make_outgoing(0, 3)
    outgoing.offer(0, 2)
    outgoing.announce(1, 1.0)
    assert outgoing.abandon(AbandonReason.CANCELLED, 2.0)
    assert (outgoing.state, outgoing.abandon_reason) == ("abandoned", "cancelled")
    assert not outgoing.offer(2, 1)
    assert not outgoing.commit(40)
    assert not outgoing.abandon(AbandonReason.STALLED, 2.0)
    assert outgoing.abandon_reason is AbandonReason.CANCELLED, "the first reason stays"
    assert outgoing.stale == 3
    assert not outgoing.drained
    outgoing.receive(1, 3.0)
    assert outgoing.drained
    outgoing.check_integrity()


def test_outgoing_waits_for_the_peer_by_progress_and_only_while_it_is_owed_something() -> None:
    outgoing = make_outgoing(0, 3)
    assert outgoing.deadline == math.inf, "computing: its call and the request end it"
    outgoing.offer(0, 3)
    outgoing.announce(2, 10.0)
    assert outgoing.deadline == 15.0
    outgoing.receive(1, 12.0)
    assert outgoing.deadline == 17.0
    outgoing.progress(13.0)  # another handoff's segment, ahead of ours on the same link
    assert not outgoing.stalled(17.9)
    assert outgoing.stalled(18.0)
    assert outgoing.expired(18.0)
    assert outgoing.awaited == "1 announced block of handoff h within 5.0 s"
    outgoing.receive(1, 14.0)
    assert outgoing.deadline == math.inf
    outgoing.announce(1, 20.0)
    outgoing.abandon(AbandonReason.CANCELLED, 21.0)
    assert outgoing.deadline == 25.0, "an end does not excuse the peer"
    outgoing.receive(1, 22.0)
    assert outgoing.drained
    assert outgoing.deadline == math.inf


def test_outgoing_has_the_requests_own_deadline_until_its_end() -> None:
    outgoing = make_outgoing(0, 1, deadline=3.0)
    assert not outgoing.expired(2.9)
    assert outgoing.expired(3.0)
    assert not outgoing.stalled(3.0), "that the request is late is not the peer's fault"
    outgoing.offer(0, 1)
    outgoing.announce(1, 1.0)
    assert outgoing.deadline == 3.0
    outgoing.abandon(AbandonReason.DEADLINE, 3.0)
    assert outgoing.deadline == 6.0


def test_durations_add_up_to_the_whole_life() -> None:
    handoff = Handoff("h", "r", "l", 0, 2, now=1.0, progress_timeout=5.0, reserve_timeout=2.0)
    assert handoff.durations(1.5) == {HandoffState.RESERVED: 0.5}
    handoff.dispatch(2.0)
    handoff.announce(0, 2, 4.0)
    assert sum(handoff.durations(7.0).values()) == 6.0
    handoff.receive(0, 2, 8.0)
    handoff.commit(32, 2, 9.0)
    assert handoff.durations(99.0) == {
        HandoffState.RESERVED: 1.0,
        HandoffState.DISPATCHED: 2.0,
        HandoffState.TRANSFERRING: 5.0,
    }
