"""A link's control stream between two benchmark processes, and the thread that stands for control.

The product carries these messages over gRPC between its servers; here they take the shortest way,
so that what is measured is the handoff and not the path of its few small messages.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec

from tasuki.engine.frames import FrameReader, encode_frame
from tasuki.messages import LinkMessage, Message


class Ask(Message, frozen=True):
    """Begin a handoff of the first `blocks` blocks: stands for the Prefill call."""

    handoff_id: str
    blocks: int


class AskBare(Message, frozen=True):
    """Send the first `blocks` blocks over the link's channel; their receives are posted."""

    blocks: int


class Turn(Message, frozen=True):
    """What of a link is on from now on."""

    digests: bool  # the sender's
    heartbeats: bool


Control = LinkMessage | Ask | AskBare | Turn


class ControlStream:
    """A LinkHost over a socket. Messages and callbacks run in `run_until`, in order."""

    def __init__(self, sock: socket.socket, on_message: Callable[[Control], None]) -> None:
        self._socket = sock
        self._on_message = on_message
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.ended = False
        self._reader = threading.Thread(target=self._read, name="bench-control", daemon=True)
        self._reader.start()

    def send(self, link_id: str, message: Control) -> None:
        with suppress(OSError):  # the end shows on the reading side
            self._socket.sendall(encode_frame(message))

    def call_soon(self, fn: Callable[[], None]) -> None:
        self._work.put(fn)

    def close(self) -> None:
        """End the stream for both sides."""
        with suppress(OSError):  # the peer may have ended it already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join(10)
        self._socket.close()

    def run_until(self, done: Callable[[], bool], seconds: float = 60.0) -> None:
        """Run what comes until `done`. Raises TimeoutError."""
        until = time.monotonic() + seconds
        while not done():
            try:
                self._work.get(timeout=max(0.0, until - time.monotonic()))()
            except queue.Empty:
                raise TimeoutError(f"the other process said nothing for {seconds} s") from None

    def _read(self) -> None:
        reader: FrameReader[Control] = FrameReader(msgspec.msgpack.Decoder(Control))
        try:
            while data := self._socket.recv(1 << 16):
                for message in reader.feed(data):
                    self._work.put(partial(self._on_message, message))
        except OSError:
            pass  # the end, as below
        self._work.put(partial(setattr, self, "ended", True))
