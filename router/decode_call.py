"""One request on one decode worker: a Decode stream as typed, checked events.

Knows nothing about the client. What a worker sends is checked here, so that a client never sees a
token twice, out of order or beyond what it asked for, whatever a worker does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import grpc

from router.watched_worker import WatchedWorker
from tasuki.errors import Code, InvalidRequestError, TasukiError, UnavailableError
from tasuki.messages import DecodeRequest, FinishedEvent, TokensEvent
from tasuki.server.status import error_from_rpc
from tasuki.v1 import worker_pb2
from tasuki.wire.decode import (
    WireDecodeEvent,
    decode_event_from_proto,
    decode_request_to_proto,
)

Call = grpc.aio.UnaryStreamCall[worker_pb2.DecodeRequest, worker_pb2.DecodeEvent]
END_TIMEOUT = 1.0  # seconds


class DecodeCall:
    """Iterate `events()` once; leaving it early cancels the request on the worker at once."""

    def __init__(self, worker: WatchedWorker, request: DecodeRequest) -> None:
        self._worker = worker
        self._request = request
        self._name = f"decode worker {worker.snapshot.worker_id}"
        samples = range(request.sampling.n)
        # index of the next token of each sample that has not ended
        self._next_index = dict.fromkeys(samples, len(request.output_token_ids))

    @property
    def is_over(self) -> bool:
        """Whether the worker has finished all samples."""
        return not self._next_index

    async def events(self) -> AsyncGenerator[WireDecodeEvent, None]:
        """Events until the Finished one of the last sample, which is always the last.

        Raises the worker's own error, UnavailableError when it went away, and a plain TasukiError
        for a stream that breaks the rules. Use with `contextlib.aclosing`.
        """
        call = self._worker.stub.Decode(decode_request_to_proto(self._request))
        try:
            while True:
                event = await self._read(call)
                if isinstance(event, TokensEvent | FinishedEvent):
                    self._check(event)
                yield event
                if self.is_over:
                    await _see_end(call)
                    return
        finally:
            call.cancel()

    async def _read(self, call: Call) -> WireDecodeEvent:
        try:
            message = await call.read()
        except grpc.aio.AioRpcError as error:
            raise self._explain(error_from_rpc(error)) from None
        if not isinstance(message, worker_pb2.DecodeEvent):  # EOF
            raise UnavailableError(f"{self._name} ended the stream before the request was finished")
        try:
            return decode_event_from_proto(message)
        except InvalidRequestError as error:
            raise self._broken(error.message) from None

    def _check(self, event: TokensEvent | FinishedEvent) -> None:
        sample, most = event.sample_index, self._request.sampling.max_tokens
        expected = self._next_index.get(sample)
        if expected is None:
            raise self._broken(f"more of sample {sample}, which has ended or was not asked for")
        if isinstance(event, FinishedEvent):
            if event.output_tokens != expected:
                raise self._broken(
                    f"a usage of {event.output_tokens} output tokens, not {expected}"
                )
            del self._next_index[sample]
            return
        if event.index != expected or not event.token_ids:
            raise self._broken(
                f"{len(event.token_ids)} tokens from index {event.index}; "
                f"expected at least one from index {expected}"
            )
        self._next_index[sample] = expected + len(event.token_ids)
        if self._next_index[sample] > most:
            raise self._broken(f"more than {most} tokens")

    def _explain(self, error: TasukiError) -> TasukiError:
        """Name the worker where the error is about it and not about the request."""
        if error.code in (Code.UNAVAILABLE, Code.CANCELLED):
            return UnavailableError(f"{self._name} went away: {error.message}", reason=error.reason)
        return error

    def _broken(self, what: str) -> TasukiError:
        return TasukiError(f"{self._name} broke the protocol: it sent {what}")


async def _see_end(call: Call) -> None:
    """Let a finished stream end by itself, so that the worker does not take it for a cancel."""
    with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
        async with asyncio.timeout(END_TIMEOUT):
            await call.read()
