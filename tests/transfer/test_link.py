"""Both ends of a link over loopback: what must hold for every connector."""

from __future__ import annotations

import threading

import pytest

from tasuki.errors import TransferError
from tasuki.messages import Announce, Commit, LinkHello, Posted, Received
from tasuki.reasons import AbandonReason
from tasuki.transfer.connector import Channel, ChannelSpec, RendezvousStore
from tasuki.transfer.connectors.loopback import LoopbackConnector
from tasuki.transfer.link_events import (
    CommitSeen,
    HandoffDrained,
    LinkFailed,
    LinkOpened,
    PeerAbandoned,
    SegmentReceived,
    SegmentSent,
)
from tests.transfer.rig import BLOCK, RECEIVER_EPOCH, SENDER_EPOCH, Rig, make_rig, settings


@pytest.fixture
def rig() -> Rig:
    rig = make_rig()
    rig.open()
    return rig


def test_opening_is_told_once_on_both_sides(rig: Rig) -> None:
    assert rig.sender.state == rig.receiver.state == "open"
    assert rig.sender.peer is not None
    assert (rig.sender.peer.worker_id, rig.sender.peer.worker_epoch) == ("d", RECEIVER_EPOCH)
    assert rig.decode.of(LinkOpened) == [LinkOpened(bit_exact=True)]
    assert len(rig.decode.of(LinkHello)[0].token) == 32
    rig.close()


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        ([3, 4, 5, 6, 7], [10, 11, 12, 13, 14]),  # both in one piece
        ([9, 4, 30, 6, 7], [1, 2, 3, 4, 5]),  # the sender stages
        ([3, 4, 5, 6, 7], [20, 11, 35, 2, 50]),  # the receiver stages
        ([9, 4, 30, 6, 7], [20, 11, 35, 2, 50]),
        ([5, 4, 3, 2, 1], [60, 61, 0, 1, 2]),
        ([8], [40]),
    ],
)
def test_c11_blocks_arrive_where_they_belong(
    rig: Rig, sent: list[int], received: list[int]
) -> None:
    handoff = rig.handoff(2, received)
    rig.sender.offer(handoff.handoff_id, 2, sent)
    rig.sender.commit(handoff.handoff_id, 111)
    rig.run_until(lambda: handoff.is_committed and bool(rig.prefill.of(HandoffDrained)))
    rig.assert_equal_blocks(sent, received)
    others = [i for i in range(64) if i not in received]
    assert rig.target.tensor[others].sum() == 0
    assert handoff.tokens == 111
    rig.receiver.forget(handoff.handoff_id)
    assert rig.sender.outstanding(handoff.handoff_id) == 0
    moved = len(sent) * BLOCK
    assert sum(e.nbytes for e in rig.decode.of(SegmentReceived)) == moved
    assert sum(e.nbytes for e in rig.prefill.of(SegmentSent)) == moved
    rig.close()


def test_chunks_travel_before_the_prompt_is_complete(rig: Rig) -> None:
    handoff = rig.handoff(0, [10, 11, 12])
    rig.sender.offer(handoff.handoff_id, 0, [1])
    rig.run_until(lambda: handoff.received_run == 1)
    rig.sender.offer(handoff.handoff_id, 1, [2, 3])
    rig.run_until(lambda: handoff.received_run == 3)
    assert not handoff.is_committed
    assert not rig.prefill.of(Commit)
    rig.sender.commit(handoff.handoff_id, 48)
    rig.run_until(lambda: handoff.is_committed)
    assert rig.decode.of(CommitSeen) == [CommitSeen(handoff.handoff_id)]
    rig.close()


class SlowToTell:
    """A connector whose sending end learns late that its channel is up."""

    name = "loopback"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self._inner = LoopbackConnector()

    def open(self, spec: ChannelSpec, store: RendezvousStore, deadline: float) -> Channel:
        channel = self._inner.open(spec, store, deadline)
        assert spec.rank == 1 or self.gate.wait(20)
        return channel


def test_the_peer_may_ask_before_this_side_knows_that_the_link_is_open() -> None:
    connector = SlowToTell()
    rig = make_rig(connector)
    rig.receiver.start()
    rig.loop.run_until(lambda: bool(rig.decode.of(LinkOpened)))
    assert rig.sender.state == "opening"
    handoff = rig.handoff(0, [3, 4])
    rig.sender.offer(handoff.handoff_id, 0, [1, 2])
    rig.sender.commit(handoff.handoff_id, 32)
    assert not rig.prefill.of(Announce)
    connector.gate.set()
    rig.run_until(lambda: handoff.is_committed)
    rig.assert_equal_blocks([1, 2], [3, 4])
    rig.close()


def test_commit_follows_the_last_announce_at_once(rig: Rig) -> None:
    handoff = rig.handoff(0, list(range(6)))
    rig.sender.offer(handoff.handoff_id, 0, list(range(6)))
    rig.sender.commit(handoff.handoff_id, 96)
    kinds = [
        type(message) for message in rig.prefill.sent if isinstance(message, Announce | Commit)
    ]
    assert kinds == [Announce, Announce, Commit]
    rig.run_until(lambda: handoff.is_committed)
    rig.close()


def test_posted_goes_back_before_the_bytes_and_received_after(rig: Rig) -> None:
    handoff = rig.handoff(0, [0, 1, 2, 3, 4])
    rig.sender.offer(handoff.handoff_id, 0, [0, 1, 2, 3, 4])
    rig.run_until(lambda: handoff.received_run == 5)
    answers = [m for m in rig.decode.sent if isinstance(m, Posted | Received)]
    for seq in (0, 1):
        posted = answers.index(Posted(link_seq=seq))
        assert posted < answers.index(Received(link_seq=seq, ok=True))
    rig.close()


def test_the_window_is_never_exceeded_and_everything_still_arrives() -> None:
    rig = make_rig(
        sending=settings("p", SENDER_EPOCH, segment_blocks=2, window_blocks=5),
    )
    rig.open()
    handoff = rig.handoff(0, list(range(30)))
    rig.sender.offer(handoff.handoff_id, 0, list(range(30)))
    assert rig.sender.unreceived_bytes == 4 * BLOCK
    assert len(rig.prefill.of(Announce)) == 2
    rig.sender.commit(handoff.handoff_id, 480)
    seen = []

    def done() -> bool:
        seen.append(rig.sender.unreceived_bytes)
        return handoff.is_committed

    rig.run_until(done)
    assert max(seen) <= 5 * BLOCK
    rig.assert_equal_blocks(range(30), range(30))
    rig.close()


def test_a_segment_larger_than_the_window_goes_alone() -> None:
    rig = make_rig(sending=settings("p", SENDER_EPOCH, segment_blocks=1, window_blocks=0))
    rig.open()
    handoff = rig.handoff(0, [0, 1, 2])
    rig.sender.offer(handoff.handoff_id, 0, [0, 1, 2])
    rig.sender.commit(handoff.handoff_id, 48)
    rig.run_until(lambda: handoff.is_committed)
    rig.close()


def test_the_smaller_segment_size_wins() -> None:
    rig = make_rig(receiving=settings("d", RECEIVER_EPOCH, segment_blocks=1))
    rig.open()
    handoff = rig.handoff(0, [0, 1, 2])
    rig.sender.offer(handoff.handoff_id, 0, [0, 1, 2])
    rig.run_until(lambda: handoff.received_run == 3)
    assert [a.nbytes for a in rig.prefill.of(Announce)] == [BLOCK] * 3
    rig.close()


def test_two_handoffs_share_the_link_in_turn(rig: Rig) -> None:
    first, second = rig.handoff(0, list(range(16))), rig.handoff(0, list(range(20, 28)))
    rig.sender.offer(first.handoff_id, 0, list(range(16)))
    rig.sender.offer(second.handoff_id, 0, list(range(30, 38)))
    rig.sender.commit(first.handoff_id, 256)
    rig.sender.commit(second.handoff_id, 128)
    rig.run_until(lambda: first.is_committed and second.is_committed)
    owners = [a.handoff_id for a in rig.prefill.of(Announce)]
    assert owners[:2] == [first.handoff_id] * 2  # the window, before the second one came
    assert owners[2:] == [first.handoff_id, second.handoff_id] * 2
    rig.assert_equal_blocks(range(30, 38), range(20, 28))
    rig.close()


def test_finished_at_the_first_token_moves_nothing(rig: Rig) -> None:
    handoff = rig.handoff(0, [0])
    rig.sender.abandon(handoff.handoff_id, AbandonReason.FINISHED)
    rig.run_until(lambda: bool(rig.decode.of(PeerAbandoned)))
    assert rig.decode.of(PeerAbandoned) == [PeerAbandoned(handoff.handoff_id, "finished")]
    assert rig.prefill.of(HandoffDrained) == [HandoffDrained(handoff.handoff_id)]
    assert rig.receiver.abandon(handoff.handoff_id, AbandonReason.FINISHED) == frozenset()
    assert not rig.prefill.of(Announce)
    rig.close()


def test_c4_late_calls_are_counted_and_dropped(rig: Rig) -> None:
    handoff = rig.handoff(0, [0, 1])
    rig.sender.offer(handoff.handoff_id, 0, [0, 1])
    rig.sender.commit(handoff.handoff_id, 32)
    rig.run_until(lambda: bool(rig.prefill.of(HandoffDrained)))
    before = rig.sender.stale
    rig.sender.offer(handoff.handoff_id, 0, [0])
    rig.sender.commit(handoff.handoff_id, 32)
    rig.sender.abandon(handoff.handoff_id, AbandonReason.CANCELLED)
    assert rig.sender.stale == before + 3
    assert len(rig.prefill.of(Commit)) == 1
    rig.close()


def test_a_handoff_id_is_used_once_at_a_time_and_only_on_an_open_link(rig: Rig) -> None:
    handoff = rig.handoff(0, [0])
    with pytest.raises(TransferError, match="new id"):
        rig.sender.begin(handoff.handoff_id, 0, 1)
    rig.close()
    with pytest.raises(TransferError, match="failed"):
        rig.sender.begin("other", 0, 1)
    with pytest.raises(TransferError, match="failed"):
        rig.receiver.expect(handoff, [0])


def test_a_handler_may_call_the_link_while_it_is_told(rig: Rig) -> None:
    handoff = rig.handoff(0, [0, 1, 2])
    told = []

    def on_event(event: object) -> None:
        told.append(event)
        if isinstance(event, SegmentReceived):
            rig.receiver.close("stalled")

    rig.receiver._life._emit = on_event
    rig.sender.offer(handoff.handoff_id, 0, [0, 1, 2])
    rig.loop.run_until(lambda: bool(rig.prefill.of(LinkFailed)))
    assert isinstance(told[-1], LinkFailed)
    assert sum(isinstance(event, LinkFailed) for event in told) == 1
