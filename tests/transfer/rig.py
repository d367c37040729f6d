"""A sending and a receiving link in one process, driven by one thread: what link tests stand on."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

import msgspec
import torch

from tasuki.clock import FakeClock
from tasuki.kv.cache import KVCache
from tasuki.kv.layout import KVLayout
from tasuki.messages import LinkMessage, PrefillTarget
from tasuki.transfer.connector import Connector
from tasuki.transfer.connectors.loopback import LoopbackConnector
from tasuki.transfer.handoff import Handoff
from tasuki.transfer.link import LinkSettings
from tasuki.transfer.link_events import LinkEvent, LinkFailed, LinkOpened
from tasuki.transfer.receiving_link import ReceivingLink
from tasuki.transfer.sending_link import SendingLink

E = TypeVar("E")

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=16)
BLOCK = LAYOUT.block_bytes  # 4096
DESCRIPTION = LAYOUT.describe(model_id="m", weights_digest="w", numerics="cpu")
SENDER_EPOCH, RECEIVER_EPOCH = 0xAAAA, 0xBBBB


def settings(
    worker_id: str,
    epoch: int,
    *,
    connector: str = "loopback",
    segment_blocks: int = 4,
    window_blocks: int = 8,
    open_timeout: float = 10.0,
) -> LinkSettings:
    return LinkSettings(
        worker_id=worker_id,
        worker_epoch=epoch,
        layout=DESCRIPTION,
        connector=connector,
        digest="xxh3",
        segment_bytes=segment_blocks * BLOCK,
        window_bytes=window_blocks * BLOCK,
        open_timeout=open_timeout,
    )


class Loop:
    """The one control thread of a test: whatever anyone queues runs here, in order."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def put(self, fn: Callable[[], None]) -> None:
        self._queue.put(fn)

    def run_until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            try:
                fn = self._queue.get(timeout=max(0.001, deadline - time.monotonic()))
            except Empty:
                raise AssertionError(f"not true within {seconds} s") from None
            fn()

    def drain(self) -> None:
        """Run what is queued now, and what that queues."""
        while not self._queue.empty():
            self._queue.get()()


@dataclass(eq=False)
class Side:
    """A LinkHost: messages cross as MessagePack, as they do between processes."""

    loop: Loop
    to_peer: Callable[[LinkMessage], None] = lambda message: None
    sent: list[LinkMessage] = field(default_factory=list)
    events: list[LinkEvent] = field(default_factory=list)
    cut: bool = False  # nothing that is sent arrives any more

    def send(self, link_id: str, message: LinkMessage) -> None:
        self.sent.append(message)
        if not self.cut:
            wire = msgspec.msgpack.encode(message)
            decoded = msgspec.msgpack.decode(wire, type=LinkMessage)
            self.loop.put(partial(self.to_peer, decoded))

    def call_soon(self, fn: Callable[[], None]) -> None:
        self.loop.put(fn)

    def of(self, kind: type[E]) -> list[E]:
        return [item for item in [*self.events, *self.sent] if isinstance(item, kind)]


@dataclass(eq=False)
class Rig:
    loop: Loop
    clock: FakeClock
    sender: SendingLink
    receiver: ReceivingLink
    source: KVCache
    target: KVCache
    prefill: Side
    decode: Side

    def open(self) -> None:
        self.receiver.start()
        self.loop.run_until(
            lambda: bool(self.prefill.of(LinkOpened) and self.decode.of(LinkOpened))
        )

    def run_until(self, condition: Callable[[], bool]) -> None:
        self.loop.run_until(condition)
        self.check()

    def check(self) -> None:
        self.sender.check_integrity()
        self.receiver.check_integrity()

    def handoff(self, first_block: int, block_ids: Sequence[int]) -> Handoff:
        """A dispatched handoff that both ends know."""
        now = self.clock()
        handoff = Handoff(
            secrets.token_hex(16), "r", self.receiver.link_id, first_block, len(block_ids),
            now=now, progress_timeout=5.0, reserve_timeout=2.0,
        )  # fmt: skip
        handoff.dispatch(now)
        self.receiver.expect(handoff, block_ids)
        self.sender.begin(handoff.handoff_id, first_block, len(block_ids))
        return handoff

    def assert_equal_blocks(self, sent: Sequence[int], received: Sequence[int]) -> None:
        for i, j in zip(sent, received, strict=True):
            found, expected = self.target.tensor[j].cpu(), self.source.tensor[i].cpu()
            assert torch.equal(found, expected), (i, j)

    def both_failed(self) -> bool:
        return bool(self.prefill.of(LinkFailed) and self.decode.of(LinkFailed))

    def close(self) -> None:
        """Close both ends and see to it that neither says so twice."""
        self.receiver.close("link_down")
        self.sender.close("link_down")
        self.loop.drain()
        self.check()
        assert len(self.prefill.of(LinkFailed)) == 1
        assert len(self.decode.of(LinkFailed)) == 1
        assert isinstance(self.decode.events[-1], LinkFailed)


def make_rig(
    connector: Connector | None = None,
    *,
    peer_connector: Connector | None = None,
    sending: LinkSettings | None = None,
    receiving: LinkSettings | None = None,
    num_blocks: int = 64,
    prefill_epoch: int = SENDER_EPOCH,
    devices: tuple[str, str] = ("cpu", "cpu"),
) -> Rig:
    connector = connector or LoopbackConnector()
    loop, clock = Loop(), FakeClock()
    prefill, decode = Side(loop), Side(loop)
    source, target = (KVCache(LAYOUT, num_blocks, device) for device in devices)
    generator = torch.Generator().manual_seed(0)
    source.tensor.copy_(torch.rand(source.tensor.shape, generator=generator))
    if source.device.type != "cpu":
        torch.cuda.synchronize(source.device)  # as a step would have
    link_id = secrets.token_hex(16)
    name = connector.name
    sender = SendingLink(
        link_id, source, connector,
        sending or settings("p", SENDER_EPOCH, connector=name),
        prefill, prefill.events.append, clock,
    )  # fmt: skip
    receiver = ReceivingLink(
        link_id, PrefillTarget(worker_id="p", worker_epoch=prefill_epoch, address=""), target,
        peer_connector or connector,
        receiving or settings("d", RECEIVER_EPOCH, connector=name),
        decode, decode.events.append, clock,
    )  # fmt: skip
    prefill.to_peer, decode.to_peer = receiver.on_message, sender.on_message
    return Rig(loop, clock, sender, receiver, source, target, prefill, decode)
