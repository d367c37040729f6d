"""The engine's end of the seam: messages from the server process, messages to it.

Two forms: a socket (the product) and a queue (in process, for tests and embedding). The control
thread waits here; any thread may send and wake.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from tasuki.engine.frames import FrameReader, encode_frame, to_engine_decoder
from tasuki.messages import FromEngine, ToEngine

RECEIVE_BYTES = 1 << 20


class Transport(Protocol):
    def wait(self, timeout: float) -> list[ToEngine] | None:
        """Messages that arrived, possibly none after `timeout` or `wake`; None: the server is
        gone.
        """

    def send(self, message: FromEngine) -> None:
        """Queue one message; never blocks."""

    def wake(self) -> None:
        """Make `wait` return."""

    def close(self) -> None:
        """Send what is queued, briefly, and return the resources."""


class SocketTransport:
    """Non-blocking both ways: a slow server process never holds up a step."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._reader: FrameReader[ToEngine] = FrameReader(to_engine_decoder)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._outgoing: deque[memoryview] = deque()
        self._watching_writes = False

    def wait(self, timeout: float) -> list[ToEngine] | None:
        messages: list[ToEngine] = []
        for key, events in self._selector.select(max(0.0, timeout)):
            if key.fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
                continue
            if events & selectors.EVENT_READ:
                try:
                    data = self._socket.recv(RECEIVE_BYTES)
                except BlockingIOError:
                    data = None
                except OSError:
                    return None
                if data == b"":
                    return None
                messages += self._reader.feed(data or b"")
        with self._lock:
            self._flush()
            self._watch_writes(bool(self._outgoing))
        return messages

    def send(self, message: FromEngine) -> None:
        with self._lock:
            self._outgoing.append(memoryview(encode_frame(message)))
            self._flush()
            blocked = bool(self._outgoing)
        if blocked:
            self.wake()  # the control thread goes on when the socket takes more

    def wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        with self._lock:
            self._socket.settimeout(1.0)
            try:
                while self._outgoing:
                    self._socket.sendall(self._outgoing.popleft())
            except OSError:
                self._outgoing.clear()  # nobody reads any more
        self._selector.close()
        self._socket.close()
        os.close(self._wake_fd)

    def _flush(self) -> None:
        while self._outgoing:
            try:
                sent = self._socket.send(self._outgoing[0])
            except BlockingIOError:
                return
            except OSError:
                self._outgoing.clear()  # the next `wait` sees the end
                return
            if sent < len(self._outgoing[0]):
                self._outgoing[0] = self._outgoing[0][sent:]
                return
            self._outgoing.popleft()

    def _watch_writes(self, wanted: bool) -> None:
        if wanted != self._watching_writes:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
            self._selector.modify(self._socket, events)
            self._watching_writes = wanted


class QueueTransport:
    """The same within one process: `deliver` is called for every message to the server side."""

    def __init__(self, deliver: Callable[[FromEngine], None]) -> None:
        self._deliver = deliver
        self._incoming: deque[ToEngine] = deque()
        self._changed = threading.Condition()
        self._woken = False
        self._ended = False

    def put(self, message: ToEngine) -> None:
        """From the server side."""
        with self._changed:
            self._incoming.append(message)
            self._changed.notify()

    def end(self) -> None:
        """The server side is gone."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def wait(self, timeout: float) -> list[ToEngine] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._incoming or self._woken or self._ended, timeout)
            self._woken = False
            messages = list(self._incoming)
            self._incoming.clear()
            return None if self._ended and not messages else messages

    def send(self, message: FromEngine) -> None:
        self._deliver(message)

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify()

    def close(self) -> None:
        """Nothing to return."""
