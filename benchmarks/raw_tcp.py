"""The same bytes over a plain TCP connection on loopback: what the machine's sockets can do."""

from __future__ import annotations

import os
import socket
import struct
import sys
import time

from benchmarks.pinning import pinned

_SIZE = struct.Struct("<Q")
MAX_BYTES = 96 << 20


class TcpReceiver:
    """Asks for bytes and reads them into one preallocated buffer."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._buffer = memoryview(bytearray(MAX_BYTES))
        self._connection: socket.socket | None = None

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def accept(self) -> None:
        self._listener.settimeout(30)
        self._connection, _ = self._listener.accept()
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive(self, nbytes: int) -> float:
        """Seconds from the request until the last byte."""
        assert self._connection is not None
        begin = time.monotonic()
        self._connection.sendall(_SIZE.pack(nbytes))
        got = 0
        while got < nbytes:
            count = self._connection.recv_into(self._buffer[got:nbytes])
            if not count:
                raise ConnectionError(f"the sender ended after {got} of {nbytes} bytes")
            got += count
        return time.monotonic() - begin

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._listener.close()


def serve(port: int) -> None:
    """Send what is asked for until the connection ends."""
    data = memoryview(os.urandom(MAX_BYTES))
    with socket.create_connection(("127.0.0.1", port), timeout=600) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while len(head := connection.recv(_SIZE.size, socket.MSG_WAITALL)) == _SIZE.size:
            connection.sendall(data[: _SIZE.unpack(head)[0]])


if __name__ == "__main__":
    with pinned(int(sys.argv[2])):
        serve(int(sys.argv[1]))
