"""One request on one decode worker: a Decode stream as typed, checked events.

Knows nothing about the client. What a worker sends is checked here, so that a client never sees a
token twice, out of order or beyond what it asked for, whatever a worker does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import grpc

from router.workers.watched_worker import WatchedWorker
from tasuki.errors import Code, InvalidRequestError, TasukiError, UnavailableError
from tasuki.messages import DecodeRequest, FinishedEvent, FinishReason, TokensEvent
from tasuki.reasons import MigrationReason, RejectionReason
from tasuki.server.status import error_from_rpc, is_ours
from tasuki.v1 import worker_pb2
from tasuki.wire.decode import (
    WireDecodeEvent,
    decode_event_from_proto,
    decode_request_to_proto,
)


class WorkerLostError(UnavailableError):
    """The worker is gone, going, or silent; the request may go on on another one."""

    migration = MigrationReason.DECODE_DIED


class WorkerDrainingError(WorkerLostError):
    default_reason = RejectionReason.DRAINING
    migration = MigrationReason.DRAINING


class WorkerSilentError(WorkerLostError):
    default_reason = MigrationReason.STALLED
    migration = MigrationReason.STALLED


Call = grpc.aio.UnaryStreamCall[worker_pb2.DecodeRequest, worker_pb2.DecodeEvent]
END_TIMEOUT = 1.0  # seconds
SILENCE = 1.0  # seconds without a word, neither here nor in a report, after which a call is lost
LOST_CODES = (Code.UNAVAILABLE, Code.CANCELLED)
BROKEN = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)  # as gRPC calls a connection that broke


class DecodeCall:
    """Iterate `events()` once; leaving it early cancels the request on the worker at once."""

    def __init__(self, worker: WatchedWorker, request: DecodeRequest, vocab_size: int) -> None:
        self._worker = worker
        self._request = request
        self._vocab_size = vocab_size
        self._name = f"decode worker {worker.snapshot.worker_id}"
        samples = range(request.sampling.n) if request.sampling.n > 1 else [request.sample_index]
        # index of the next token of each sample that has not ended
        self._next_index = dict.fromkeys(samples, len(request.output_token_ids))
        self._call: Call | None = None
        self._heard_at = 0.0  # when the last event came, on the loop's clock
        self._given_up = False

    @property
    def is_over(self) -> bool:
        """Whether the worker has finished all samples."""
        return not self._next_index

    async def events(self) -> AsyncGenerator[WireDecodeEvent, None]:
        """Events until the Finished one of the last sample, which is always the last.

        Raises the worker's own error, WorkerLostError when it went away, and a plain TasukiError
        for a stream that breaks the rules. Use with `contextlib.aclosing`.
        """
        self._heard_at = asyncio.get_running_loop().time()
        call = self._call = self._worker.stub.Decode(decode_request_to_proto(self._request))
        self._worker.on_loss.add(self._doubt)
        if not self._worker.live:
            self._doubt(0.0)  # it was lost since it was chosen
        try:
            while True:
                event = await self._read(call)
                self._heard_at = asyncio.get_running_loop().time()
                if isinstance(event, TokensEvent | FinishedEvent):
                    self._check(event)
                yield event
                if self.is_over:
                    await _see_end(call)
                    return
        finally:
            self._worker.on_loss.discard(self._doubt)
            self._call = None
            call.cancel()

    def _doubt(self, silent: float) -> None:
        """No report came for `silent` seconds, or the worker's watch ended: this call must soon
        tell something, if it has not just done so, or is given up.
        """
        loop = asyncio.get_running_loop()
        quiet = min(silent, loop.time() - self._heard_at)
        loop.call_later(max(0.0, SILENCE - quiet), self._give_up, self._heard_at)

    def _give_up(self, heard_at: float) -> None:
        if self._call is None or self._worker.live:
            return
        if self._heard_at > heard_at:
            self._doubt(SILENCE)
        else:
            self._given_up = True
            self._call.cancel()

    async def _read(self, call: Call) -> WireDecodeEvent:
        try:
            message = await call.read()
        except grpc.aio.AioRpcError as error:
            raise self._explain(error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._given_up or (task is not None and task.cancelling()):
                raise  # the caller goes away, be it in the very moment in which we give up
            raise WorkerSilentError(f"{self._name} is silent: stopped, or cut off") from None
        if not isinstance(message, worker_pb2.DecodeEvent):  # EOF
            raise WorkerLostError(f"{self._name} ended the stream before the request was finished")
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
            if event.finish_reason is FinishReason.CANCELLED:
                raise WorkerLostError(f"{self._name} gave the request up")
            if event.output_tokens != expected:
                raise self._broken(
                    f"a usage of {event.output_tokens} output tokens, not {expected}"
                )
            if event.prompt_tokens != len(self._request.prompt_token_ids):
                raise self._broken(f"a usage of {event.prompt_tokens} prompt tokens")
            del self._next_index[sample]
            return
        if event.index != expected or not event.token_ids:
            raise self._broken(
                f"{len(event.token_ids)} tokens from index {event.index}; "
                f"expected at least one from index {expected}"
            )
        self._check_contents(event)
        self._next_index[sample] = expected + len(event.token_ids)
        if self._next_index[sample] > most:
            raise self._broken(f"more than {most} tokens")

    def _check_contents(self, event: TokensEvent) -> None:
        """Ids that the model has, and of logprobs what was asked for: those of the prompt once,
        with its first token.
        """
        if max(event.token_ids) >= self._vocab_size:  # the wire type is unsigned
            raise self._broken(f"token {max(event.token_ids)}; the ids end at {self._vocab_size}")
        sampling = self._request.sampling
        first = not event.index and event.sample_index == self._request.sample_index
        told = sampling.prompt_logprobs is not None and first
        wanted = len(self._request.prompt_token_ids) - 1 if told else 0
        each = [] if sampling.logprobs is None else event.token_ids
        if [one.token_id for one in event.logprobs] != each or wanted != len(event.prompt_logprobs):
            raise self._broken(
                f"logprobs of {len(event.logprobs)} tokens and of {len(event.prompt_logprobs)} of "
                f"the prompt; expected {len(each)} and {wanted}"
            )

    def _explain(self, status: grpc.aio.AioRpcError) -> TasukiError:
        """Name the worker where the error is about it and not about the request."""
        error = error_from_rpc(status)
        broken = status.code() in BROKEN and not is_ours(status)
        if error.code not in LOST_CODES and not broken:
            return error
        going = error.reason == RejectionReason.DRAINING
        kind = WorkerDrainingError if going else WorkerLostError
        return kind(f"{self._name} went away: {error.message}", reason=error.reason)

    def _broken(self, what: str) -> TasukiError:
        return TasukiError(f"{self._name} broke the protocol: it sent {what}")


async def _see_end(call: Call) -> None:
    """Let a finished stream end by itself, so that the worker does not take it for a cancel."""
    with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
        async with asyncio.timeout(END_TIMEOUT):
            await call.read()
