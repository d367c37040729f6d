"""Both ends of a link that can also do without: without digests, heartbeats, or the lease itself.

Whatever is left out, the bytes go over the one channel that the link opened: two connections on
loopback may differ by a factor of two, and that must not be taken for a cost.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.control_stream import AskBare, Control, Turn
from benchmarks.link_ends import LAYOUT, Receiver, Sender, settings
from benchmarks.pinning import pinned
from tasuki.clock import monotonic
from tasuki.errors import TransferError
from tasuki.kv.cache import KVCache
from tasuki.transfer.connector import Channel
from tasuki.transfer.digest import no_digest, xxh3
from tasuki.transfer.receiving_link import ReceivingLink
from tasuki.transfer.sending_link import SendingLink

TICK_SECONDS = 0.05  # the engine's: so often it looks at deadlines, and whether a heartbeat is due

Link = SendingLink | ReceivingLink


@dataclass(frozen=True)
class Arm:
    """What of a link's doing a turn has."""

    sender_digests: bool
    receiver_digests: bool
    heartbeats: bool  # and the look at deadlines that comes with them
    lease: bool  # handoffs, announcements, their answers; without it: receives posted in advance


def channel_of(link: Link) -> Channel:
    """The open link's own channel."""
    channel = link._life.channel
    assert channel is not None
    return channel


def set_digests(link: Link, on: bool) -> None:
    """Between two handoffs; a link itself settles it once, when it opens."""
    link._digest = read_all if on else no_digest


def read_all(view: torch.Tensor) -> int:
    """An xxh3 like any other, but not told: so that one end can do without, and yet agree."""
    xxh3(view)
    return no_digest(view)


def cut(cache: KVCache, blocks: int) -> list[torch.Tensor]:
    """The first `blocks` blocks in the segments that a link would make of them."""
    most = settings("", 0).max_segment_bytes(LAYOUT.block_bytes) // LAYOUT.block_bytes
    return [
        cache.block_bytes_view(first, min(most, blocks - first)) for first in range(0, blocks, most)
    ]


class Ticker:
    """What an engine's control thread does beside its messages, while it is `on`."""

    def __init__(self, link: Link, call_soon: Callable[[Callable[[], None]], None]) -> None:
        self.on = False
        self._link = link
        self._call_soon = call_soon
        self._over = threading.Event()
        self._ticks = 0
        self._thread = threading.Thread(target=self._run, name="bench-ticks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(TICK_SECONDS):
            if self.on:
                self._call_soon(self._tick)

    def _tick(self) -> None:
        self._ticks += 1
        self._link.expire()
        self._link.beat(self._ticks, 0.0)


class CostReceiver:
    """A receiver that takes turns."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._ticker = Ticker(receiver.link, receiver.stream.call_soon)

    def turn(self, arm: Arm, blocks: int, times: int) -> float:
        """Have `blocks` blocks sent so many times, one after the other; seconds for all of them."""
        set_digests(self._receiver.link, arm.receiver_digests)
        self._ticker.on = arm.heartbeats
        self._send(Turn(digests=arm.sender_digests, heartbeats=arm.heartbeats))
        receive = self._receiver.receive if arm.lease else self._receive_bare
        seconds = sum(receive(blocks) for _ in range(times))
        self._ticker.on = False
        return seconds

    def close(self) -> None:
        self._ticker.close()

    def _receive_bare(self, blocks: int) -> float:
        receiver = self._receiver
        begin = monotonic()
        left = len(views := cut(receiver.cache, blocks))

        def arrived(error: TransferError | None) -> None:  # on the channel's completion thread
            nonlocal left
            receiver.failure = receiver.failure or ("" if error is None else error.message)
            left -= 1
            if not left or error is not None:
                receiver.stream.call_soon(lambda: None)  # wakes the waiting thread

        for view in views:
            channel_of(receiver.link).post_receive(view, arrived)
        self._send(AskBare(blocks=blocks))
        receiver.run_until(lambda: not left)
        return monotonic() - begin

    def _send(self, message: AskBare | Turn) -> None:
        self._receiver.stream.send(self._receiver.link.link_id, message)


class CostSender(Sender):
    """`python -m benchmarks.cost_ends DESCRIPTOR CORE`, until its socket ends."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._ticker = Ticker(self.link, self.stream.call_soon)

    def _on_message(self, message: Control) -> None:
        match message:
            case Turn():
                set_digests(self.link, message.digests)
                self._ticker.on = message.heartbeats
            case AskBare():
                Burst(channel_of(self.link), cut(self.cache, message.blocks)).fill()
            case _:
                super()._on_message(message)


class Burst:
    """Sends segments in order, as many at once as a link's window holds."""

    def __init__(self, channel: Channel, views: list[torch.Tensor]) -> None:
        self._channel = channel
        self._views = views[::-1]
        self._room = settings("", 0).window_bytes
        self._lock = threading.Lock()  # the sends stay in order, whoever launches them

    def fill(self) -> None:
        with self._lock:
            while self._views and self._views[-1].numel() <= self._room:
                view = self._views.pop()
                self._room -= view.numel()
                self._channel.send(view, partial(self._sent, view.numel()))

    def _sent(self, nbytes: int, error: TransferError | None) -> None:  # on a completion thread
        if error is None:  # else the receiver hears of it as well
            with self._lock:
                self._room += nbytes
            self.fill()


def main() -> None:
    torch.set_num_threads(1)
    with pinned(int(sys.argv[2])):
        CostSender(socket.socket(fileno=int(sys.argv[1]))).run()
    os._exit(0)  # gloo's threads need no goodbye


if __name__ == "__main__":
    main()
