"""What goes wrong on a link: abandoned, dropped, damaged, out of order, closed in the middle."""

from __future__ import annotations

import pytest
import torch

from tasuki.messages import Announce, Commit, LinkClosed, LinkMessage, Posted, Received
from tasuki.reasons import AbandonReason
from tasuki.transfer.connectors.loopback import LoopbackConnector
from tasuki.transfer.connectors.loopback_fault import PlannedFault, Verdict
from tasuki.transfer.link_events import (
    BlocksReleased,
    DigestMismatch,
    HandoffDrained,
    LinkFailed,
    SegmentReceived,
    SegmentSent,
)
from tests.transfer.rig import BLOCK, Rig, make_rig


def open_rig(plan: dict[int, Verdict] | None = None) -> tuple[Rig, PlannedFault]:
    fault = PlannedFault(plan or {})
    rig = make_rig(LoopbackConnector(fault))
    rig.open()
    return rig, fault


def test_c5_blocks_with_posted_receives_stay_quarantined_until_they_complete() -> None:
    rig, fault = open_rig({1: Verdict.HOLD})
    target = [10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 33]
    handoff = rig.handoff(0, target)
    rig.sender.offer(handoff.handoff_id, 0, list(range(12)))
    rig.run_until(lambda: handoff.received_run == 4 and len(rig.decode.of(Posted)) == 3)
    assert handoff.posted == {4, 5, 6, 7, 8, 9, 10, 11}
    quarantined = rig.receiver.abandon(handoff.handoff_id, AbandonReason.CANCELLED)
    assert quarantined == {20, 21, 22, 23, 30, 31, 32, 33}
    assert rig.receiver.abandon(handoff.handoff_id, AbandonReason.CANCELLED) == frozenset()
    assert not rig.decode.of(BlocksReleased)
    fault.release(1)
    rig.run_until(lambda: len(rig.decode.of(BlocksReleased)) == 2)
    released = frozenset().union(*(event.block_ids for event in rig.decode.of(BlocksReleased)))
    assert released == quarantined
    assert handoff.received_run == 4
    assert handoff.state == "abandoned"
    assert rig.receiver.stale == 2
    rig.close()
    assert rig.decode.of(LinkFailed)[0].released_block_ids == frozenset()


def test_a_handoff_keeps_its_received_run_and_the_link_goes_on() -> None:
    rig, _ = open_rig()
    first = rig.handoff(0, [10, 11, 12, 13, 14, 15])
    rig.sender.offer(first.handoff_id, 0, [0, 1, 2, 3])
    rig.run_until(lambda: first.received_run == 4)
    assert rig.receiver.abandon(first.handoff_id, AbandonReason.STALLED) == frozenset()
    rig.assert_equal_blocks([0, 1, 2, 3], [10, 11, 12, 13])
    rig.target.tensor[14:16] = -1.0  # reused at once
    rig.sender.offer(first.handoff_id, 4, [4, 5])  # lands in scratch
    rig.sender.commit(first.handoff_id, 96)
    second = rig.handoff(0, [20, 21])
    rig.sender.offer(second.handoff_id, 0, [6, 7])
    rig.sender.commit(second.handoff_id, 32)
    rig.run_until(lambda: second.is_committed and len(rig.prefill.of(HandoffDrained)) == 2)
    assert bool((rig.target.tensor[14:16] == -1.0).all())
    rig.assert_equal_blocks([6, 7], [20, 21])
    assert rig.receiver.stale == 2  # one segment and one Commit
    assert rig.decode.of(Received)[-1].ok
    rig.close()


def test_the_prefill_side_abandons_in_the_middle_and_pays_its_debts() -> None:
    rig, fault = open_rig({0: Verdict.HOLD})
    handoff = rig.handoff(0, list(range(40)))
    rig.sender.offer(handoff.handoff_id, 0, list(range(40)))
    announced = len(rig.prefill.of(Announce))
    assert rig.sender.outstanding(handoff.handoff_id) == 8
    rig.sender.abandon(handoff.handoff_id, AbandonReason.CANCELLED)
    assert not rig.prefill.of(HandoffDrained), "announced blocks are still being read"
    fault.release(0)
    rig.run_until(lambda: bool(rig.prefill.of(HandoffDrained)))
    assert len(rig.prefill.of(Announce)) == announced
    assert handoff.received_run == 8
    assert not rig.prefill.of(Commit)
    rig.close()


def test_an_abandoned_staged_segment_is_not_copied_into_blocks() -> None:
    rig, fault = open_rig({0: Verdict.HOLD})
    handoff = rig.handoff(0, [10, 20])
    rig.sender.offer(handoff.handoff_id, 0, [0, 1])
    rig.run_until(lambda: bool(rig.decode.of(Posted)))
    assert rig.receiver.abandon(handoff.handoff_id, AbandonReason.CANCELLED) == {10, 20}
    fault.release(0)
    rig.run_until(lambda: bool(rig.decode.of(BlocksReleased)))
    assert rig.target.tensor.sum() == 0
    rig.close()


def test_a_dropped_segment_is_caught_by_its_progress_deadline() -> None:
    rig, _ = open_rig({1: Verdict.DROP})
    handoff = rig.handoff(0, list(range(12)))
    rig.sender.offer(handoff.handoff_id, 0, list(range(12)))
    rig.sender.commit(handoff.handoff_id, 192)
    rig.run_until(lambda: len(rig.decode.of(SegmentReceived)) == 2)
    assert not handoff.is_committed
    assert handoff.received_run == 4
    assert not handoff.expired(rig.clock())
    rig.clock.advance(5.0)
    assert handoff.expired(rig.clock())
    quarantined = rig.receiver.abandon(handoff.handoff_id, AbandonReason.STALLED)
    assert quarantined == {4, 5, 6, 7}
    rig.close()
    assert rig.decode.of(LinkFailed)[0].released_block_ids == quarantined


def test_a_peer_that_receives_nothing_is_given_up_and_its_link_with_it() -> None:
    rig, _ = open_rig({1: Verdict.HOLD})
    handoff = rig.handoff(0, list(range(8)))
    rig.sender.offer(handoff.handoff_id, 0, list(range(8)))
    rig.run_until(lambda: rig.sender.outstanding(handoff.handoff_id) == 4)
    rig.clock.advance(4.0)
    other = rig.handoff(0, [20])  # what is announced now excuses nothing that is owed already
    rig.sender.offer(other.handoff_id, 0, [20])
    assert rig.prefill.of(Announce)[-1].handoff_id == other.handoff_id
    rig.clock.advance(0.9)
    rig.sender.expire()
    assert rig.sender.state == "open"
    rig.clock.advance(0.1)
    rig.sender.expire()
    failed = rig.prefill.of(LinkFailed)[0]
    assert failed.reason == "stalled"
    awaited = f"4 announced blocks of handoff {handoff.handoff_id} within 5.0 s"
    assert failed.message == f"the peer did not receive {awaited}"
    rig.loop.run_until(rig.both_failed)
    assert rig.prefill.of(LinkClosed) == [LinkClosed(reason="stalled")]
    rig.close()


def test_a_slow_link_on_which_anything_moves_is_not_given_up() -> None:
    """First in, first out: what waits behind others comes nearer with each of them."""
    rig, fault = open_rig({0: Verdict.HOLD, 1: Verdict.HOLD})
    first, second = rig.handoff(0, [0, 1, 2, 3]), rig.handoff(0, [4, 5, 6, 7])
    rig.sender.offer(first.handoff_id, 0, [0, 1, 2, 3])
    rig.sender.offer(second.handoff_id, 0, [4, 5, 6, 7])
    for index in range(2):
        rig.clock.advance(4.0)
        rig.sender.expire()
        assert rig.sender.state == "open", f"given up after {rig.clock()} s"
        fault.release(index)
        rig.run_until(lambda: len(rig.decode.of(SegmentReceived)) > index)  # noqa: B023
        rig.run_until(lambda: len(rig.prefill.of(SegmentSent)) > index)  # noqa: B023
    rig.clock.advance(100.0)
    rig.sender.expire()
    assert rig.sender.state == "open", "nothing is owed"
    rig.close()


def test_a_flipped_byte_is_caught_and_closes_the_link() -> None:
    rig, _ = open_rig({1: Verdict.FLIP})
    handoff = rig.handoff(0, list(range(12)))
    rig.sender.offer(handoff.handoff_id, 0, list(range(12)))
    rig.run_until(rig.both_failed)
    assert rig.decode.of(DigestMismatch) == [DigestMismatch(handoff.handoff_id)]
    assert Received(link_seq=1, ok=False) in rig.decode.sent
    assert rig.decode.of(LinkFailed)[0].reason == "digest"
    assert rig.prefill.of(LinkFailed)[0].reason == "digest"
    assert handoff.received_run == 4
    assert not handoff.is_committed
    assert rig.receiver.abandon(handoff.handoff_id, AbandonReason.DIGEST) == frozenset()


def test_a_flipped_byte_in_an_abandoned_segment_closes_the_link_and_ends_its_quarantine() -> None:
    rig, fault = open_rig({0: Verdict.HOLD})
    handoff = rig.handoff(0, [7])
    rig.sender.offer(handoff.handoff_id, 0, [0])
    rig.run_until(lambda: bool(rig.decode.of(Posted)))
    quarantined = rig.receiver.abandon(handoff.handoff_id, AbandonReason.CANCELLED)
    rig.source.tensor[0] += 1.0  # written after it was announced
    fault.release(0)
    rig.run_until(rig.both_failed)
    assert not rig.decode.of(DigestMismatch)
    assert rig.decode.of(LinkFailed)[0].released_block_ids == quarantined == {7}


def announce(**changes: int | str) -> Announce:
    fields: dict[str, int | str] = {"link_seq": 0, "handoff_id": "", "first_block": 0}
    fields |= {"count": 1, "nbytes": BLOCK, "digest": 0, **changes}
    return Announce(**fields)  # type: ignore[arg-type] # built by name


@pytest.mark.parametrize(
    ("changes", "known", "word"),
    [
        ({"nbytes": BLOCK + 1}, True, "bytes"),
        ({"nbytes": BLOCK - 1}, False, "bytes"),
        ({"count": 0, "nbytes": 0}, False, "blocks"),
        ({"count": -1, "nbytes": -BLOCK}, True, "blocks"),
        ({"count": 5, "nbytes": 5 * BLOCK}, False, "at most"),
        ({"link_seq": 1}, True, "next on this link"),
        ({"first_block": 9}, True, "outside"),
        ({"count": 3, "nbytes": 3 * BLOCK}, True, "outside"),
    ],
)
def test_a_violation_closes_the_link_before_anything_is_posted(
    changes: dict[str, int], known: bool, word: str
) -> None:
    rig, _ = open_rig()
    handoff = rig.handoff(0, [0, 1])
    handoff_id = handoff.handoff_id if known else "unknown"
    rig.receiver.on_message(announce(handoff_id=handoff_id, **changes))
    failed = rig.decode.of(LinkFailed)[0]
    assert word in failed.message
    assert failed.reason == "link_down"
    assert not rig.decode.of(Posted)
    rig.loop.run_until(rig.both_failed)


@pytest.mark.parametrize(
    "message",
    [Posted(link_seq=1), Received(link_seq=0, ok=True), Received(link_seq=7, ok=True)],
)
def test_answers_out_of_order_close_the_link(message: LinkMessage) -> None:
    rig, _ = open_rig({0: Verdict.HOLD})
    handoff = rig.handoff(0, [0])
    rig.decode.cut = True
    rig.sender.offer(handoff.handoff_id, 0, [0])
    rig.sender.on_message(message)
    assert rig.prefill.of(LinkFailed)[0].reason == "link_down"
    rig.loop.run_until(rig.both_failed)


def test_a_commit_that_does_not_add_up_closes_the_link() -> None:
    rig, _ = open_rig()
    handoff = rig.handoff(0, [0, 1])
    rig.receiver.on_message(Commit(handoff_id=handoff.handoff_id, tokens=32, blocks=2))
    assert "Commit" in rig.decode.of(LinkFailed)[0].message
    rig.loop.run_until(rig.both_failed)


def test_close_in_the_middle_fences_and_names_what_was_quarantined() -> None:
    rig, fault = open_rig({1: Verdict.HOLD})
    live, gone = rig.handoff(0, [0, 1, 2, 3, 4]), rig.handoff(0, [10, 11, 12])
    rig.sender.offer(live.handoff_id, 0, [0, 1, 2, 3, 4])
    rig.sender.offer(gone.handoff_id, 0, [5, 6, 7])
    rig.run_until(lambda: live.received_run == 4 and len(rig.decode.of(Posted)) == 3)
    assert rig.receiver.abandon(gone.handoff_id, AbandonReason.CANCELLED) == {10, 11, 12}
    rig.receiver.close("prefill_died")
    before = rig.target.tensor.clone()
    fault.release(1)
    failed = rig.decode.of(LinkFailed)[0]
    assert failed.reason == "prefill_died"
    assert failed.released_block_ids == {10, 11, 12}
    assert rig.receiver.abandon(live.handoff_id, AbandonReason.PREFILL_DIED) == frozenset()
    assert live.received_run == 4
    rig.loop.run_until(rig.both_failed)
    assert torch.equal(rig.target.tensor, before)
    assert rig.decode.of(LinkClosed) == [LinkClosed(reason="prefill_died")]
    rig.close()


def test_a_lost_peer_channel_fails_this_side_once() -> None:
    rig, _ = open_rig({0: Verdict.HOLD})
    handoff = rig.handoff(0, [0])
    rig.sender.offer(handoff.handoff_id, 0, [0])
    rig.run_until(lambda: bool(rig.decode.of(Posted)))
    rig.prefill.cut = True  # its LinkClosed never arrives
    rig.sender.close("link_down")
    rig.loop.run_until(rig.both_failed)
    assert "did not arrive" in rig.decode.of(LinkFailed)[0].message
    rig.close()
