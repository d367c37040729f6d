"""The NCCL connector without NCCL: pairing, tokens, the cap, the fence, and a link over it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tasuki.clock import monotonic
from tasuki.errors import FenceLostError, TransferError
from tasuki.kv.cache import KVCache
from tasuki.messages import Posted
from tasuki.transfer.connector import ChannelSpec
from tasuki.transfer.connectors import nccl, nccl_channel
from tasuki.transfer.connectors.nccl import NcclConnector, link_bytes
from tasuki.transfer.connectors.nccl_pair import LIBRARY_BYTES, IdStore
from tasuki.transfer.link_events import SegmentReceived
from tests.transfer.channels import TOKENS, Completions, make_stores, open_pair, payload
from tests.transfer.fake_nccl import FakeNccl
from tests.transfer.rig import make_rig

CPU = torch.device("cpu")


def connectors(fake: FakeNccl, links: int = 4) -> tuple[NcclConnector, NcclConnector]:
    """One for each side, as each has a device of its own."""
    return (
        NcclConnector(CPU, links, fake.open_pair),
        NcclConnector(CPU, links, fake.open_pair),
    )


def test_bytes_arrive_in_order_and_every_ticket_completes_once() -> None:
    fake = FakeNccl()
    one, other = connectors(fake)
    sender, receiver = open_pair(one, peer=other)
    assert sender.needs_posted
    assert not sender.digests
    assert all(pair.is_open for pair in fake.pairs)
    done = Completions()
    views = [torch.zeros(8, dtype=torch.uint8) for _ in range(5)]
    for index, view in enumerate(views):
        receiver.post_receive(view, done.named(f"r{index}"))
        sender.send(payload(8, index), done.named(f"s{index}"))
    done.wait(10)
    assert [view[0].item() for view in views] == [0, 1, 2, 3, 4]
    assert not any(done.errors.values())
    sender.close()
    receiver.close()
    sender.close()
    sender.send(payload(8, 1), done.named("late"))
    receiver.post_receive(views[0], done.named("too late"))
    assert str(done.errors["late"]) == str(done.errors["too late"]) == "the channel is closed"


def test_closing_ends_what_waits_for_a_silent_peer() -> None:
    one, other = connectors(FakeNccl())
    sender, receiver = open_pair(one, peer=other)
    done = Completions()
    receiver.post_receive(torch.zeros(8, dtype=torch.uint8), done.named("r0"))
    receiver.post_receive(torch.zeros(8, dtype=torch.uint8), done.named("r1"))
    receiver.close()
    assert done.order == ["r0", "r1"]
    assert all(str(error) == "the channel is closed" for error in done.errors.values())
    sender.close()


def test_a_kernel_that_does_not_end_is_a_lost_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_channel, "FENCE_DEADLINE", 0.1)
    fake = FakeNccl()
    one, other = connectors(fake)
    sender, receiver = open_pair(one, peer=other)
    done = Completions()
    told: list[str] = []
    view = torch.zeros(8, dtype=torch.uint8)
    receiver.post_receive(view, done.named("r"), lambda: told.append("r"))
    while not told:
        time.sleep(0.001)
    fake.wires["l"].deaf = True
    with pytest.raises(FenceLostError, match="must exit"):
        receiver.close()
    fake.wires["l"].deaf = False
    sender.close()
    fake.pairs[0].abort()
    fake.pairs[1].abort()
    done.wait(1)


def test_another_peer_is_refused_and_leaves_room() -> None:
    one, other = connectors(FakeNccl(), links=1)
    for link_id in "ab":
        with pytest.raises(TransferError, match="a wrong one-time token"):
            open_pair(one, link_id, peer=other, expect=(b"x" * 32, TOKENS[1]))
    for channel in open_pair(one, "m", peer=other):
        channel.close()


def test_a_peer_that_does_not_come_is_given_up_in_time() -> None:
    fake = FakeNccl()
    one, _ = connectors(fake)
    spec = ChannelSpec("l", 1, TOKENS[1], TOKENS[0], 1 << 20)
    begin = monotonic()
    with pytest.raises(TransferError, match=r"in time; check .* --connector gloo"):
        one.open(spec, make_stores()[0], begin + 0.2)
    assert 0.15 < monotonic() - begin < 5
    assert not fake.pairs[0].is_open


def test_a_peer_that_does_not_come_and_a_library_that_holds_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl, "FENCE_DEADLINE", 0.1)
    fake = FakeNccl()

    def deaf(*args: Any) -> Any:
        pair = fake.open_pair(*args)

        def hold() -> None:
            time.sleep(0.5)

        pair.abort = hold  # type: ignore[method-assign]
        return pair

    spec = ChannelSpec("l", 1, TOKENS[1], TOKENS[0], 1 << 20)
    with pytest.raises(FenceLostError, match="never opened"):
        NcclConnector(CPU, 1, deaf).open(spec, make_stores()[0], monotonic() + 0.1)


def test_links_are_capped_and_a_closed_one_makes_room() -> None:
    one, other = connectors(FakeNccl(), links=2)
    first, second = open_pair(one, "a", peer=other), open_pair(one, "b", peer=other)
    with pytest.raises(TransferError, match=r"has 2 NCCL links.*--nccl-links"):
        open_pair(one, "c", peer=other, seconds=1)
    for channel in (*first, *second):
        channel.close()
    for channel in open_pair(one, "d", peer=other):
        channel.close()


def test_what_a_link_takes() -> None:
    assert link_bytes(16 << 20, 4 << 20) == (24 << 20) + LIBRARY_BYTES


def test_the_id_travels_and_later_questions_stay_here() -> None:
    stores = make_stores()
    first, second = (IdStore(store, monotonic() + 5) for store in stores)
    first.set("0:1", b"id")
    assert second.get("0:1") == b"id"
    second.wait(["0:1"])
    second.seal()
    assert second.check(["0:1"])
    assert not second.check(["other"])
    assert (second.add("n", 2), second.add("n", 3)) == (2, 5)
    second.set("mine", b"x")
    assert not first.check(["mine"])
    with pytest.raises(TransferError, match="after the link opened"):
        second.get("other")
    with pytest.raises(TransferError, match="in time"):
        IdStore(stores[0], monotonic()).get("mine")


def test_a_link_sends_only_what_was_launched_on_the_other_side() -> None:
    """Two links end at one device: the second one's receive waits, and so does its Posted."""
    fake = FakeNccl()
    device = NcclConnector(CPU, 4, fake.open_pair)
    rigs = [
        make_rig(NcclConnector(CPU, 4, fake.open_pair), peer_connector=device) for _ in range(2)
    ]
    for rig in rigs:
        rig.open()
    wires = [fake.wires[rig.sender.link_id] for rig in rigs]
    wires[0].stuck = True
    handoffs = [rig.handoff(0, [40, 41, 50]) for rig in rigs]
    for rig, handoff in zip(rigs, handoffs, strict=True):
        rig.sender.offer(handoff.handoff_id, 0, [3, 4, 9])
    rigs[0].run_until(lambda: bool(rigs[0].decode.of(Posted)))
    deadline = time.monotonic() + 0.1
    while time.monotonic() < deadline:
        rigs[1].loop.drain()
        assert not rigs[1].decode.of(Posted), "it was told to send into a receive that waits"
    with wires[0].lock:
        wires[0].stuck = False
        wires[0].move()
    for rig, handoff in zip(rigs, handoffs, strict=True):
        rig.sender.commit(handoff.handoff_id, 40)
        rig.run_until(lambda handoff=handoff: handoff.is_committed)  # type: ignore[misc]
        rig.assert_equal_blocks([3, 4, 9], [40, 41, 50])
        rig.close()


class OnAGpu(KVCache):
    """Says that it is where a channel of host memory cannot reach."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def test_a_cache_that_the_channel_cannot_reach_is_staged_on_both_sides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, pinned = torch.empty, []

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.pop("pin_memory", False):
            pinned.append(args[0])
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    rig = make_rig()
    for cache in (rig.source, rig.target):
        cache.__class__ = OnAGpu
    rig.open()
    assert len(pinned) == 2
    handoff = rig.handoff(0, [*range(40, 60)])
    rig.sender.offer(handoff.handoff_id, 0, [*range(20)])
    rig.sender.commit(handoff.handoff_id, 320)
    rig.run_until(lambda: handoff.is_committed)
    assert len(rig.decode.of(SegmentReceived)) == 5
    rig.assert_equal_blocks([*range(20)], [*range(40, 60)])
    rig.close()
