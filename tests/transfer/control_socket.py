"""Link messages over a stream socket: length-prefixed MessagePack, as between real processes."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

import msgspec

from tasuki.messages import LinkMessage


class ControlSocket:
    """`on_message` and `on_end` are called on a reader thread of its own."""

    def __init__(
        self,
        connection: socket.socket,
        on_message: Callable[[LinkMessage], None],
        on_end: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._on_message = on_message
        self._on_end = on_end
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def send(self, message: LinkMessage) -> None:
        frame = msgspec.msgpack.encode(message)
        with suppress(OSError):  # the end shows on the reading side
            self._connection.sendall(struct.pack("=I", len(frame)) + frame)

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._connection.close()

    def _read(self) -> None:
        with suppress(OSError), self._connection.makefile("rb") as stream:
            while len(head := stream.read(4)) == 4:
                (size,) = struct.unpack("=I", head)
                frame = stream.read(size)
                if len(frame) < size:
                    break
                self._on_message(msgspec.msgpack.decode(frame, type=LinkMessage))
        self._on_end()
