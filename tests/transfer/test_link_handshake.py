from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tasuki.messages import (
    Announce,
    LayoutDescription,
    LinkAccept,
    LinkClosed,
    LinkHello,
    LinkMessage,
    Posted,
    Received,
    Rendezvous,
)
from tasuki.transfer.connectors.loopback import LoopbackConnector
from tasuki.transfer.digest import DigestName
from tasuki.transfer.link_events import LinkFailed, LinkOpened
from tests.transfer.rig import BLOCK, DESCRIPTION, RECEIVER_EPOCH, SENDER_EPOCH, make_rig, settings

RECEIVING = settings("d", RECEIVER_EPOCH)
SENDING = settings("p", SENDER_EPOCH)


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "bfloat16"), ("block_size", 32), ("weights_digest", "other"), ("num_layers", 3)],
)
def test_a_wrong_layout_is_refused_and_names_the_field(field: str, value: object) -> None:
    layout: LayoutDescription = msgspec.structs.replace(DESCRIPTION, **{field: value})
    rig = make_rig(receiving=replace(RECEIVING, layout=layout))
    rig.receiver.start()
    rig.loop.run_until(lambda: bool(rig.prefill.of(LinkFailed)))
    failed = rig.prefill.of(LinkFailed)[0]
    assert failed.reason == "layout"
    assert field in failed.message
    assert rig.sender.state == "failed"
    assert not rig.prefill.of(LinkAccept)
    assert not rig.prefill.of(LinkClosed), "the status of the control stream says it"
    rig.receiver.close("layout", failed.message)
    assert rig.decode.of(LinkFailed)[0].reason == "layout"


def test_the_decode_side_checks_the_layout_as_well() -> None:
    rig = make_rig()
    rig.receiver.start()
    layout = msgspec.structs.replace(DESCRIPTION, head_dim=16)
    rig.receiver.on_message(
        LinkAccept(token=b"t" * 32, layout=layout, digest="xxh3", max_segment_bytes=BLOCK)
    )
    failed = rig.decode.of(LinkFailed)[0]
    assert (failed.reason, "head_dim" in failed.message) == ("layout", True)
    assert len(rig.decode.of(LinkClosed)) == 1


def test_other_numerics_are_allowed_and_reported() -> None:
    layout = msgspec.structs.replace(DESCRIPTION, numerics="other")
    rig = make_rig(receiving=replace(RECEIVING, layout=layout))
    rig.open()
    assert rig.decode.of(LinkOpened) == rig.prefill.of(LinkOpened) == [LinkOpened(bit_exact=False)]
    rig.close()


def test_c4_a_stale_epoch_is_refused() -> None:
    rig = make_rig(prefill_epoch=SENDER_EPOCH + 1)
    rig.receiver.start()
    rig.loop.run_until(lambda: bool(rig.prefill.of(LinkFailed)))
    failed = rig.prefill.of(LinkFailed)[0]
    assert (failed.reason, "epoch" in failed.message) == ("refused", True)
    rig.receiver.close("refused")


def test_another_connector_is_refused() -> None:
    rig = make_rig(receiving=replace(RECEIVING, connector="gloo"))
    rig.receiver.start()
    rig.loop.run_until(lambda: bool(rig.prefill.of(LinkFailed)))
    assert "--connector" in rig.prefill.of(LinkFailed)[0].message
    rig.receiver.close("refused")


@pytest.mark.parametrize(
    ("ours", "theirs", "zero"),
    [("none", "none", True), ("xxh3", "none", False), ("none", "xxh3", False)],
)
def test_digests_are_on_if_either_wants_them(
    ours: DigestName, theirs: DigestName, zero: bool
) -> None:
    rig = make_rig(
        sending=replace(SENDING, digest=ours), receiving=replace(RECEIVING, digest=theirs)
    )
    rig.open()
    handoff = rig.handoff(0, [0])
    rig.sender.offer(handoff.handoff_id, 0, [1])
    rig.run_until(lambda: handoff.received_run == 1)
    assert (rig.prefill.of(Announce)[0].digest == 0) is zero
    rig.close()


def test_a_peer_that_never_answers_is_given_up_on_both_sides() -> None:
    rig = make_rig()
    rig.decode.cut = True
    rig.receiver.start()
    rig.clock.advance(9.9)
    rig.receiver.expire()
    assert rig.receiver.state == "opening"
    rig.clock.advance(0.2)
    rig.receiver.expire()
    rig.sender.expire()
    for side in (rig.decode, rig.prefill):
        assert side.of(LinkFailed)[0].reason == "link_down"
    rig.receiver.expire()
    assert len(rig.decode.of(LinkFailed)) == 1


def test_a_peer_that_cannot_be_paired_with_fails_both_by_the_deadline() -> None:
    short = replace(RECEIVING, open_timeout=0.05), replace(SENDING, open_timeout=0.05)
    rig = make_rig(
        LoopbackConnector(),
        peer_connector=LoopbackConnector(),
        receiving=short[0],
        sending=short[1],
    )
    rig.receiver.start()
    rig.loop.run_until(rig.both_failed)
    failed = rig.decode.of(LinkFailed) + rig.prefill.of(LinkFailed)
    assert any("did not open" in event.message for event in failed)


def test_closing_while_opening_ends_the_opener() -> None:
    rig = make_rig()
    rig.prefill.cut = True  # its Rendezvous keys never arrive
    rig.receiver.start()
    rig.loop.run_until(lambda: bool(rig.prefill.of(LinkAccept)))
    rig.receiver.on_message(rig.prefill.of(LinkAccept)[0])
    opener = rig.receiver._life._opener
    assert opener is not None
    rig.receiver.close("link_down")
    opener.join(10)
    assert not opener.is_alive()
    rig.loop.run_until(rig.both_failed)
    assert rig.receiver.state == "failed"


def hello(**changes: object) -> LinkHello:
    plain = LinkHello(
        token=b"t" * 32, decode_worker_id="d", decode_epoch=1, prefill_worker_id="p",
        prefill_epoch=SENDER_EPOCH, layout=DESCRIPTION, connector="loopback", digest="xxh3",
        max_segment_bytes=4 * BLOCK,
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


@pytest.mark.parametrize(
    "message",
    [
        hello(token=b"short"),
        hello(digest="md5"),
        hello(max_segment_bytes=BLOCK - 1),
        Announce(link_seq=0, handoff_id="h", first_block=0, count=1, nbytes=BLOCK, digest=0),
        Posted(link_seq=0),
        Received(link_seq=0, ok=True),
        Rendezvous(key="k", value=bytes(1 << 17)),
    ],
)
def test_a_bad_first_message_fails_the_sending_side(message: LinkMessage) -> None:
    rig = make_rig()
    rig.sender.on_message(message)
    assert rig.sender.state == "failed"
    assert len(rig.prefill.of(LinkFailed)) == 1
    rig.sender.on_message(hello())
    assert rig.sender.stale == 1


def test_a_second_hello_fails_the_link() -> None:
    rig = make_rig()
    rig.open()
    rig.sender.on_message(hello())
    rig.loop.run_until(rig.both_failed)


@pytest.mark.parametrize("segment", [BLOCK - 1, 5 * BLOCK])
def test_an_accept_with_an_impossible_segment_size_fails_the_link(segment: int) -> None:
    rig = make_rig()
    rig.receiver.start()
    rig.receiver.on_message(
        LinkAccept(token=b"t" * 32, layout=DESCRIPTION, digest="xxh3", max_segment_bytes=segment)
    )
    assert rig.decode.of(LinkFailed)[0].reason == "refused"
