"""A link between two real processes over gloo, and the death of one in the middle."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from tasuki.clock import monotonic
from tasuki.kv.cache import KVCache
from tasuki.messages import Announce, Heartbeat, LinkMessage, PrefillTarget
from tasuki.reasons import AbandonReason
from tasuki.transfer.connectors.gloo import GlooConnector
from tasuki.transfer.handoff import Handoff
from tasuki.transfer.link_events import LinkEvent, LinkFailed, LinkOpened
from tasuki.transfer.receiving_link import ReceivingLink
from tests.transfer.control_socket import ControlSocket
from tests.transfer.rig import LAYOUT, RECEIVER_EPOCH, SENDER_EPOCH, Loop, Side, settings
from tests.transfer.sender_process import HANDOFF_ID, LINK_ID, source_cache

BLOCKS = 40


@dataclass(eq=False)
class Decode:
    """The decode end in this process: the handoff is expected as soon as the link is open."""

    side: Side
    link: ReceivingLink
    cache: KVCache
    handoff: Handoff
    announced: list[Announce] = field(default_factory=list)
    ended: bool = False

    def on_event(self, event: LinkEvent) -> None:
        self.side.events.append(event)

    def on_message(self, message: LinkMessage) -> None:
        if isinstance(message, Announce):
            self.announced.append(message)
        self.link.on_message(message)

    def on_end(self) -> None:
        self.ended = True
        self.link.close("prefill_died")


@contextmanager
def split_processes(die_after: int, device: str = "cpu") -> Iterator[Decode]:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tests.transfer.sender_process"]
    arguments = [str(theirs.fileno()), str(BLOCKS), str(die_after), device]
    child = subprocess.Popen([*command, *arguments], pass_fds=[theirs.fileno()])
    theirs.close()
    loop = Loop()
    side, cache = Side(loop), KVCache(LAYOUT, BLOCKS, device)
    handoff = Handoff(
        HANDOFF_ID, "r", LINK_ID, 0, BLOCKS, now=0.0, progress_timeout=5.0, reserve_timeout=2.0
    )
    handoff.dispatch(0.0)

    def on_event(event: LinkEvent) -> None:
        decode.on_event(event)
        if isinstance(event, LinkOpened):
            decode.link.expect(handoff, list(reversed(range(BLOCKS))))
            side.send(LINK_ID, Heartbeat(steps=0, age=0.0))

    link = ReceivingLink(
        LINK_ID, PrefillTarget(worker_id="p", worker_epoch=SENDER_EPOCH, address=""), cache,
        GlooConnector(stall=2.0), settings("d", RECEIVER_EPOCH, connector="gloo", open_timeout=30),
        side, on_event, monotonic,
    )  # fmt: skip
    decode = Decode(side, link, cache, handoff)
    control = ControlSocket(
        ours,
        lambda message: loop.put(partial(decode.on_message, message)),
        lambda: loop.put(decode.on_end),
    )
    side.to_peer = control.send
    try:
        link.start()
        yield decode
        link.close("link_down")
        link.check_integrity()
    finally:
        control.close()
        try:
            child.wait(20)
        finally:
            child.kill()
            child.wait()


@pytest.mark.dist
def test_two_processes_hand_over_every_byte() -> None:
    with split_processes(die_after=0) as decode:
        decode.side.loop.run_until(lambda: decode.handoff.is_committed or decode.ended, 60)
        assert decode.handoff.is_committed
        expected = source_cache(BLOCKS)
        assert torch.equal(decode.cache.tensor.flip(0), expected.tensor)
        assert decode.handoff.tokens == BLOCKS * LAYOUT.block_size


@pytest.mark.dist
def test_a_sender_killed_in_the_middle_costs_only_what_had_not_arrived() -> None:
    with split_processes(die_after=4) as decode:
        decode.side.loop.run_until(lambda: decode.ended, 60)
        failed = decode.side.of(LinkFailed)
        (reason,) = (event.reason for event in failed)
        assert reason in ("prefill_died", "link_down")  # whichever connection is seen to end first
        assert decode.link.abandon(HANDOFF_ID, AbandonReason.PREFILL_DIED) == frozenset()
        kept = decode.handoff.received_run
        assert kept < BLOCKS
        assert len(decode.announced) <= 4
        expected = source_cache(BLOCKS)
        for block in range(kept):
            assert torch.equal(decode.cache.tensor[BLOCKS - 1 - block], expected.tensor[block])
