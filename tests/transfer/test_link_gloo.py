"""Both ends of a link over real gloo pairs, in one process."""

from __future__ import annotations

import time

import pytest
import torch

from tasuki.messages import Posted
from tasuki.reasons import AbandonReason
from tasuki.transfer.connectors.gloo import GlooConnector
from tasuki.transfer.link_events import BlocksReleased, HandoffDrained, LinkFailed
from tests.transfer.rig import BLOCK, Rig, make_rig


@pytest.fixture
def rig() -> Rig:
    rig = make_rig(GlooConnector(stall=1.0))
    rig.open()
    return rig


@pytest.mark.parametrize("fragmented", [False, True])
def test_blocks_arrive_where_they_belong(rig: Rig, fragmented: bool) -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
    sent = order[:30] if fragmented else list(range(30))
    received = order[20:50] if fragmented else list(range(30, 60))
    handoff = rig.handoff(0, received)
    for first in range(0, 30, 7):
        rig.sender.offer(handoff.handoff_id, first, sent[first : first + 7])
    rig.sender.commit(handoff.handoff_id, 480)
    rig.run_until(lambda: handoff.is_committed and bool(rig.prefill.of(HandoffDrained)))
    rig.assert_equal_blocks(sent, received)
    rig.receiver.forget(handoff.handoff_id)
    rig.close()


def test_abandoned_segments_end_their_quarantine_and_the_link_goes_on(rig: Rig) -> None:
    first = rig.handoff(0, list(range(16)))
    rig.sender.offer(first.handoff_id, 0, list(range(16)))
    rig.loop.run_until(lambda: bool(rig.decode.of(Posted)))
    quarantined = rig.receiver.abandon(first.handoff_id, AbandonReason.CANCELLED)
    rig.sender.abandon(first.handoff_id, AbandonReason.CANCELLED)
    rig.run_until(lambda: bool(rig.prefill.of(HandoffDrained)))
    released = [event.block_ids for event in rig.decode.of(BlocksReleased)]
    assert frozenset().union(*released) == quarantined
    second = rig.handoff(0, [40, 41])
    rig.sender.offer(second.handoff_id, 0, [1, 2])
    rig.sender.commit(second.handoff_id, 32)
    rig.run_until(lambda: second.is_committed)
    rig.assert_equal_blocks([1, 2], [40, 41])
    rig.close()


def test_closing_during_a_transfer_is_quick_and_final() -> None:
    rig = make_rig(GlooConnector(stall=1.0), num_blocks=2048)
    rig.open()
    handoff = rig.handoff(0, list(range(2048)))
    rig.sender.offer(handoff.handoff_id, 0, list(range(2048)))
    rig.loop.run_until(lambda: handoff.received_run >= 8)
    began = time.monotonic()
    rig.receiver.close("stalled")
    assert time.monotonic() - began < 1.0
    before = rig.target.tensor.clone()
    rig.loop.run_until(lambda: bool(rig.prefill.of(LinkFailed)))
    assert torch.equal(rig.target.tensor, before)
    assert handoff.received_run * BLOCK < 2048 * BLOCK
    for block in range(handoff.received_run):
        assert torch.equal(rig.target.tensor[block], rig.source.tensor[block])
    rig.close()
