"""The Prefill calls that a decode worker's engine asked for: this end of each is the server's.

Replies go to the engine as they come; the end of a call is told exactly once, whatever ended it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc

from tasuki.errors import CancelledError, InvalidRequestError, TasukiError, TransferError
from tasuki.messages import CallPrefill, PrefillCallEnded, PrefillReply, ToEngine
from tasuki.server.peer_channels import PeerChannels
from tasuki.server.status import error_from_rpc, to_error_status
from tasuki.v1 import worker_pb2_grpc
from tasuki.wire.prefill import prefill_event_from_proto, prefill_request_to_proto

log = logging.getLogger(__name__)


class PrefillCalls:
    """By handoff id. `close` ends all of them."""

    def __init__(self, channels: PeerChannels, send: Callable[[ToEngine], None]) -> None:
        self._channels = channels
        self._send = send
        self._tasks: dict[str, asyncio.Task[TasukiError | None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def call(self, message: CallPrefill) -> None:
        """Begin a call, under a handoff id that the engine has drawn anew."""
        handoff_id = message.request.handoff_id
        assert handoff_id not in self._tasks, f"handoff {handoff_id} is being called already"
        task = asyncio.create_task(self._stream(message), name=f"prefill {handoff_id}")
        self._tasks[handoff_id] = task
        task.add_done_callback(lambda task: self._end(handoff_id, task))

    def cancel(self, handoff_id: str) -> None:
        """Cancel a call: the prefill worker sees it at once. Unknown ids are ignored."""
        task = self._tasks.get(handoff_id)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Cancel all calls and wait until they are over."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self, handoff_id: str, task: asyncio.Task[TasukiError | None]) -> None:
        """A callback and not a `finally`: a task that is cancelled at once runs neither."""
        del self._tasks[handoff_id]
        error: TasukiError | None
        if task.cancelled():
            error = CancelledError("the call was cancelled by its caller")
        elif (bug := task.exception()) is not None:
            log.error("a Prefill call failed", exc_info=bug)
            error = TransferError(f"the call could not be made: {bug!r}")
        else:
            error = task.result()
        status = None if error is None else to_error_status(error)
        self._send(PrefillCallEnded(handoff_id=handoff_id, error=status))

    async def _stream(self, message: CallPrefill) -> TasukiError | None:
        """Carry replies until the call ends; returns why, None for well."""
        request = message.request
        async with self._channels.lease(message.target.address) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Prefill(
                prefill_request_to_proto(request), timeout=request.timeout
            )
            try:
                async for event in call:
                    reply = prefill_event_from_proto(event)
                    self._send(PrefillReply(handoff_id=request.handoff_id, event=reply))
            except grpc.aio.AioRpcError as error:
                return error_from_rpc(error)
            except InvalidRequestError as error:
                return TransferError(f"the prefill worker sent nonsense: {error.message}")
            finally:
                call.cancel()  # nothing after a call that is over
        return None
