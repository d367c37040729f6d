"""The two ends of a link, as a benchmark builds them: the product's classes over real gloo."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable

import torch

from benchmarks.control_stream import Ask, AskBare, Control, ControlStream, Turn
from benchmarks.pinning import pinned
from tasuki.clock import monotonic
from tasuki.kv.cache import KVCache
from tasuki.kv.layout import KVLayout
from tasuki.messages import PrefillTarget
from tasuki.transfer.connectors.gloo import GlooConnector
from tasuki.transfer.handoff import Handoff
from tasuki.transfer.link import LinkSettings
from tasuki.transfer.link_events import LinkEvent, LinkFailed
from tasuki.transfer.receiving_link import ReceivingLink
from tasuki.transfer.sending_link import SendingLink

LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16)  # the demo model's
MAX_BLOCKS = 96
LINK_ID = "be" * 16
SENDER = PrefillTarget(worker_id="prefill", worker_epoch=1, address="")


def settings(worker_id: str, epoch: int) -> LinkSettings:
    """As a worker has them by default; digests on."""
    layout = LAYOUT.describe(model_id="bench", weights_digest="-", numerics="-")
    return LinkSettings(
        worker_id=worker_id, worker_epoch=epoch, layout=layout, connector="gloo", digest="xxh3"
    )


def touched_cache() -> KVCache:
    """A cache whose memory is there: page faults are not what is measured."""
    cache = KVCache(LAYOUT, MAX_BLOCKS)
    cache.tensor.normal_()
    return cache


class Receiver:
    """The decode end, in the benchmark's own process."""

    def __init__(self, sock: socket.socket, cache: KVCache) -> None:
        self.cache = cache
        self.stream = ControlStream(sock, self._on_message)
        self.link = ReceivingLink(
            LINK_ID, SENDER, self.cache, GlooConnector(), settings("decode", 2), self.stream,
            self._on_event, monotonic,
        )  # fmt: skip
        self.failure = ""
        self._number = 0

    def open(self) -> None:
        self.link.start()
        self.run_until(lambda: self.link.state == "open")

    def receive(self, blocks: int) -> float:
        """Ask for a handoff; returns seconds until it is committed."""
        self._number += 1
        handoff_id = f"{self._number:032x}"
        begin = monotonic()
        handoff = Handoff(
            handoff_id, "bench", LINK_ID, 0, blocks, now=begin, progress_timeout=30.0,
            reserve_timeout=30.0,
        )  # fmt: skip
        self.link.expect(handoff, list(range(blocks)))
        handoff.dispatch(begin)
        self.stream.send(LINK_ID, Ask(handoff_id=handoff_id, blocks=blocks))
        self.run_until(lambda: handoff.is_committed)
        seconds = monotonic() - begin
        self.link.forget(handoff_id)
        return seconds

    def close(self) -> None:
        self.link.close("link_down")
        self.stream.close()

    def run_until(self, done: Callable[[], bool]) -> None:
        self.stream.run_until(lambda: done() or self.stream.ended or bool(self.failure))
        if not done():
            raise RuntimeError(f"the link failed: {self.failure or 'the sender process ended'}")

    def _on_message(self, message: Control) -> None:
        assert not isinstance(message, Ask | AskBare | Turn)
        self.link.on_message(message)

    def _on_event(self, event: LinkEvent) -> None:
        if isinstance(event, LinkFailed):
            self.failure = event.message


class Sender:
    """The prefill end: `python -m benchmarks.link_ends DESCRIPTOR CORE`, until its socket ends."""

    def __init__(self, sock: socket.socket) -> None:
        self.cache = touched_cache()
        self.stream = ControlStream(sock, self._on_message)
        self.link = SendingLink(
            LINK_ID, self.cache, GlooConnector(), settings("prefill", 1), self.stream,
            lambda event: None, monotonic,
        )  # fmt: skip

    def run(self) -> None:
        self.stream.run_until(lambda: self.stream.ended, seconds=600.0)

    def _on_message(self, message: Control) -> None:
        assert not isinstance(message, AskBare | Turn)
        if not isinstance(message, Ask):
            self.link.on_message(message)
            return
        self.link.begin(message.handoff_id, 0, message.blocks)
        self.link.offer(message.handoff_id, 0, list(range(message.blocks)))
        self.link.commit(message.handoff_id, message.blocks * LAYOUT.block_size)


def main() -> None:
    torch.set_num_threads(1)
    with pinned(int(sys.argv[2])):
        Sender(socket.socket(fileno=int(sys.argv[1]))).run()
    os._exit(0)  # gloo's threads need no goodbye


if __name__ == "__main__":
    main()
