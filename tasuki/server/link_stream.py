"""One end of one link's control stream: frames in order both ways, until one side ends it.

Both ends are alike: the decode worker's is a call, the prefill worker's a handler. Knows nothing
about what the frames mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from tasuki.errors import InvalidRequestError, TasukiError, TransferError
from tasuki.messages import CloseLink, LinkMessage, LinkReceived, ToEngine
from tasuki.server.mailbox import Mailbox
from tasuki.server.status import error_from_rpc, error_from_status
from tasuki.v1 import worker_pb2
from tasuki.wire.link import link_frame_from_proto, link_frame_to_proto

Frames: TypeAlias = AsyncIterable[worker_pb2.LinkFrame]
WriteFrame: TypeAlias = Callable[[worker_pb2.LinkFrame], Awaitable[None]]
LAST_WORDS_SECONDS = 1.0  # how long a status may take to follow a write that failed
_GONE = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)


@dataclass(frozen=True)
class LinkEnd:
    """How a stream ended: by our own engine (`ours`) or not, and with which error."""

    ours: bool
    error: TasukiError | None


class LinkStream:
    def __init__(self, link_id: str, send: Callable[[ToEngine], None]) -> None:
        self.link_id = link_id
        self._send = send
        self._closing = False
        self._outbox: Mailbox[LinkMessage | CloseLink] = Mailbox()

    @property
    def closing(self) -> bool:
        """Whether our engine has ended it; what it sent may still be on its way out."""
        return self._closing

    def put(self, message: LinkMessage | CloseLink) -> None:
        """Send a message after all before it; CloseLink is the last."""
        self._closing = self._closing or isinstance(message, CloseLink)
        self._outbox.put([message])

    async def carry(
        self,
        frames: Frames,
        write: WriteFrame,
        done_writing: Callable[[], Awaitable[None]] | None = None,
    ) -> LinkEnd:
        """Carry frames both ways until either side ends the stream. Cancel it to give up.

        A call passes `done_writing`; it must not be cancelled before its last frames have left, so
        that the other side gets a moment to end it. A handler's frames leave before its status.
        """
        reader = asyncio.create_task(self._read(frames))
        writer = asyncio.create_task(self._write(write))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            if writer.done() and (end := writer.result()) is not None:
                if done_writing is not None:
                    await done_writing()
                    await asyncio.wait((reader,), timeout=LAST_WORDS_SECONDS)
                return end
            # a write that failed: the other direction knows why, and says so in a moment
            done, _ = await asyncio.wait((reader,), timeout=LAST_WORDS_SECONDS)
            if not done:
                return LinkEnd(False, TransferError("the link's control stream broke"))
            return LinkEnd(False, reader.result())
        finally:
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def _read(self, frames: Frames) -> TasukiError | None:
        """Frames to the engine, until the other side ends the stream; returns why."""
        try:
            async for frame in frames:
                link_id, message = link_frame_from_proto(frame)
                if link_id != self.link_id:
                    raise InvalidRequestError(
                        f"a frame of link {link_id} came on the stream of link {self.link_id}"
                    )
                if not self._closing:  # else our engine wants to hear no more
                    self._send(LinkReceived(link_id=link_id, message=message))
        except grpc.aio.AioRpcError as error:
            return error_from_rpc(error)
        except InvalidRequestError as error:
            return error
        except _GONE as error:
            return TransferError(f"the link's control stream broke: {error}")
        return None

    async def _write(self, write: WriteFrame) -> LinkEnd | None:
        """The engine's messages to the other side, until its CloseLink; None: a write failed."""
        try:
            while True:
                for message in await self._outbox.take():
                    if isinstance(message, CloseLink):
                        error = message.error
                        return LinkEnd(True, None if error is None else error_from_status(error))
                    await write(link_frame_to_proto(self.link_id, message))
        except _GONE:
            return None
