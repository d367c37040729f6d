"""The prefill end of a link in a process of its own: `python -m tests.transfer.sender_process`.

Arguments: descriptor of the control socket, number of blocks to hand over, after how many
Announces to die by SIGKILL (0: never), and the device of the cache. Ends when the control socket
ends.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial

import torch

from tasuki.clock import monotonic
from tasuki.kv.cache import KVCache
from tasuki.messages import Announce, Heartbeat, LinkMessage
from tasuki.transfer.connectors.gloo import GlooConnector
from tasuki.transfer.link_events import LinkEvent
from tasuki.transfer.sending_link import SendingLink
from tests.transfer.control_socket import ControlSocket
from tests.transfer.rig import LAYOUT, SENDER_EPOCH, Loop, settings

HANDOFF_ID = "ab" * 16
LINK_ID = "cd" * 16


def source_cache(num_blocks: int, device: str = "cpu") -> KVCache:
    cache = KVCache(LAYOUT, num_blocks, device)
    generator = torch.Generator().manual_seed(7)
    cache.tensor.copy_(torch.rand(cache.tensor.shape, generator=generator))
    if cache.device.type != "cpu":
        torch.cuda.synchronize(cache.device)  # as a step would have
    return cache


class Process:
    """A LinkHost whose control stream is a socket."""

    def __init__(self, descriptor: int, num_blocks: int, die_after: int, device: str) -> None:
        self._loop = Loop()
        self._num_blocks = num_blocks
        self._announces_left = die_after
        self._ended = False
        self.link = SendingLink(
            LINK_ID, source_cache(num_blocks, device), GlooConnector(),
            settings("p", SENDER_EPOCH, connector="gloo"), self, self.on_event, monotonic,
        )  # fmt: skip
        self._socket = ControlSocket(
            socket.socket(fileno=descriptor),
            lambda message: self._loop.put(partial(self.on_message, message)),
            lambda: self._loop.put(self.on_end),
        )

    def send(self, link_id: str, message: LinkMessage) -> None:
        self._socket.send(message)
        if isinstance(message, Announce) and self._announces_left:
            self._announces_left -= 1
            if not self._announces_left:
                os.kill(os.getpid(), signal.SIGKILL)

    def call_soon(self, fn: Callable[[], None]) -> None:
        self._loop.put(fn)

    def on_event(self, event: LinkEvent) -> None:
        pass

    def on_message(self, message: LinkMessage) -> None:
        self.link.on_message(message)
        if isinstance(message, Heartbeat):  # stands for the Prefill call
            self.link.begin(HANDOFF_ID, 0, self._num_blocks)
            self.link.offer(HANDOFF_ID, 0, list(range(self._num_blocks)))
            self.link.commit(HANDOFF_ID, self._num_blocks * LAYOUT.block_size)

    def on_end(self) -> None:
        self.link.close("link_down")
        self._ended = True

    def run(self) -> None:
        self._loop.run_until(lambda: self._ended, 60)


if __name__ == "__main__":
    torch.set_num_threads(1)
    descriptor, num_blocks, die_after = map(int, sys.argv[1:4])
    Process(descriptor, num_blocks, die_after, sys.argv[4]).run()
