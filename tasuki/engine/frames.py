"""Length-prefixed MessagePack frames on a byte stream: what server and engine process exchange.

Torch-free, and no pickle anywhere. A frame is a 4-byte little-endian length and that many bytes.
"""

from __future__ import annotations

import struct
from typing import Generic, TypeVar

import msgspec

from tasuki.messages import FromEngine, Message, ToEngine

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")
M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()
to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode_frame(message: Message) -> bytes:
    body = _encoder.encode(message)
    assert len(body) <= MAX_FRAME_BYTES
    return _LENGTH.pack(len(body)) + body


class FrameReader(Generic[M]):
    """Turns received bytes back into messages, whatever the pieces they arrive in."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """The messages completed by `data`. Raises ValueError when the peer does not speak this."""
        self._buffer += data
        messages: list[M] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise ValueError(
                    f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed"
                )
            end = start + _LENGTH.size + length
            if end > len(self._buffer):
                break
            messages.append(self._decoder.decode(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return messages
