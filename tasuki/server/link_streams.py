"""The control streams of a worker's links: those it opens (decode) and those it serves (prefill).

A stream's end is told to the engine exactly once, unless the engine itself ended it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from tasuki.errors import InvalidRequestError, TasukiError, TransferError, UnavailableError
from tasuki.messages import (
    CloseLink,
    LinkEnded,
    LinkHello,
    LinkReceived,
    LinkSend,
    LinkStarted,
    OpenLink,
    PrefillTarget,
    ToEngine,
)
from tasuki.server.link_stream import LAST_WORDS_SECONDS, Frames, LinkEnd, LinkStream, WriteFrame
from tasuki.server.peer_channels import PeerChannels
from tasuki.server.status import to_error_status
from tasuki.v1 import worker_pb2, worker_pb2_grpc
from tasuki.wire.link import link_frame_from_proto

log = logging.getLogger(__name__)


class LinkStreams:
    """By link id. `close` ends those that this worker opened; served ones end with their calls."""

    def __init__(
        self, channels: PeerChannels, send: Callable[[ToEngine], None], hello_timeout: float
    ) -> None:
        self._channels = channels
        self._send = send
        self._hello_timeout = hello_timeout
        self._streams: dict[str, LinkStream] = {}
        self._tasks: dict[str, asyncio.Task[LinkEnd]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    # --- what the engine says -------------------------------------------------------------------

    def open(self, message: OpenLink) -> None:
        """Open a stream to a prefill worker, under an id that the engine has drawn anew."""
        link_id = message.link_id
        assert link_id not in self._streams, f"link {link_id} exists already"
        stream = self._streams[link_id] = LinkStream(link_id, self._send)
        task = asyncio.create_task(self._dial(stream, message.target), name=f"link {link_id}")
        self._tasks[link_id] = task
        task.add_done_callback(lambda task: self._dialled_end(link_id, task))

    def send(self, message: LinkSend) -> None:
        """Send on a stream; one that has ended drops it, and its end was told."""
        stream = self._streams.get(message.link_id)
        if stream is not None:
            stream.put(message.message)

    def end(self, message: CloseLink) -> None:
        """End a stream from this side, after what was sent on it."""
        stream = self._streams.get(message.link_id)
        if stream is not None:
            stream.put(message)

    async def close(self) -> None:
        """End all streams that this worker opened and wait until they are over: those that the
        engine has ended get a moment for their last words.
        """
        tasks = dict(self._tasks)
        for link_id, task in tasks.items():
            if not self._streams[link_id].closing:
                task.cancel()
        if tasks:
            await asyncio.wait(tasks.values(), timeout=2 * LAST_WORDS_SECONDS)
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    # --- streams this worker opens --------------------------------------------------------------

    async def _dial(self, stream: LinkStream, target: PrefillTarget) -> LinkEnd:
        async with self._channels.lease(target.address) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Link()
            try:
                return await stream.carry(call, call.write, call.done_writing)
            finally:
                call.cancel()

    def _dialled_end(self, link_id: str, task: asyncio.Task[LinkEnd]) -> None:
        del self._streams[link_id], self._tasks[link_id]
        if task.cancelled():
            return  # `close`: the engine is gone, or going
        if (bug := task.exception()) is not None:
            log.error("a link's control stream failed", exc_info=bug)
            self._tell_end(link_id, TransferError(f"the stream could not be kept: {bug!r}"))
        elif not (end := task.result()).ours:
            self._tell_end(link_id, end.error)

    # --- streams this worker serves -------------------------------------------------------------

    async def serve(self, frames: AsyncIterator[worker_pb2.LinkFrame], write: WriteFrame) -> None:
        """Serve a stream that a decode worker opened, until one side ends it.

        Raises the error that its status should show. Cancelled when the caller goes away.
        """
        link_id, hello = await self._read_hello(frames)
        with self._served(link_id) as stream:
            self._send(LinkStarted(link_id=link_id))
            self._send(LinkReceived(link_id=link_id, message=hello))
            try:
                end = await stream.carry(frames, write)
            except asyncio.CancelledError:
                self._tell_end(link_id, UnavailableError("the decode worker went away"))
                raise
        if not end.ours:
            self._tell_end(link_id, end.error)
        if end.error is not None:
            raise end.error

    async def _read_hello(self, frames: Frames) -> tuple[str, LinkHello]:
        try:
            async with asyncio.timeout(self._hello_timeout):
                async for frame in frames:
                    link_id, hello = link_frame_from_proto(frame)
                    if not isinstance(hello, LinkHello):
                        raise InvalidRequestError(
                            f"a link began with {type(hello).__name__}; expected LinkHello"
                        )
                    return link_id, hello
        except TimeoutError:
            pass
        raise InvalidRequestError(f"no LinkHello within {self._hello_timeout} s")

    @contextmanager
    def _served(self, link_id: str) -> Iterator[LinkStream]:
        if link_id in self._streams:
            raise InvalidRequestError(f"link {link_id} exists already; draw a new id")
        stream = self._streams[link_id] = LinkStream(link_id, self._send)
        try:
            yield stream
        finally:
            del self._streams[link_id]

    def fail_served(self, error: TasukiError) -> None:
        """End all streams that this worker serves: its engine is gone."""
        status = to_error_status(error)
        for link_id, stream in self._streams.items():
            if link_id not in self._tasks:
                stream.put(CloseLink(link_id=link_id, error=status))

    def _tell_end(self, link_id: str, error: TasukiError | None) -> None:
        status = None if error is None else to_error_status(error)
        self._send(LinkEnded(link_id=link_id, error=status))
