"""`tasuki.v1.Worker`: what routers and decode workers call on a worker.

Turns calls into messages for the engine and its events into responses; decides nothing about a
request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import msgspec

from tasuki.clock import Clock, monotonic
from tasuki.errors import InvalidRequestError, UnsupportedError
from tasuki.messages import (
    MAX_PROFILE_STEPS,
    CaptureProfile,
    FailedEvent,
    FaultInjected,
    FinishReason,
    InjectFault,
    PrefillDoneEvent,
    ProfileCaptured,
    StartDecode,
    StartPrefill,
    ToEngine,
)
from tasuki.server.engine_commands import EngineCommands
from tasuki.server.link_streams import LinkStreams
from tasuki.server.request_streams import RequestStream, RequestStreams, is_last
from tasuki.server.status import error_from_status
from tasuki.server.watch import WatchStreams
from tasuki.server.worker_state import WorkerState, limit_timeout
from tasuki.v1 import worker_pb2, worker_pb2_grpc
from tasuki.wire.decode import decode_event_to_proto, decode_request_from_proto
from tasuki.wire.prefill import prefill_event_to_proto, prefill_request_from_proto

PROFILE_SECONDS = 10.0
MAX_PROFILE_SECONDS = 300.0
FAULTS = ("cut", "slow", "corrupt")
MAX_FAULT = 1e12
FAULT_SECONDS = 10.0
PROFILE_GRACE = 30.0  # one step, and making sense of what was recorded

CallContext = grpc.aio.ServicerContext[Any, Any]
Encode = Callable[[Any], Any]


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Handlers write instead of yielding: a cancelled one then ends where it stands, at once.

    (Hence the ignored overrides: grpc.aio takes both forms, the generated types only know one.)
    """

    def __init__(
        self,
        state: WorkerState,
        streams: RequestStreams,
        links: LinkStreams,
        watches: WatchStreams,
        commands: EngineCommands,
        drain: Callable[[], None],
        clock: Clock = monotonic,
    ) -> None:
        self._state = state
        self._streams = streams
        self._links = links
        self._watches = watches
        self._commands = commands
        self._drain = drain
        self._clock = clock

    async def Decode(  # type: ignore[override]  # see the class
        self, request: worker_pb2.DecodeRequest, context: CallContext
    ) -> None:
        self._state.require_role("Decode")
        self._state.require_accepting()
        asked = decode_request_from_proto(request)
        timeout = limit_timeout(asked.timeout, remaining(context))
        asked = msgspec.structs.replace(asked, timeout=timeout)
        await self._serve(
            lambda stream_id: StartDecode(stream_id=stream_id, request=asked),
            context,
            timeout,
            decode_event_to_proto,
        )

    async def Prefill(  # type: ignore[override]  # see the class
        self, request: worker_pb2.PrefillRequest, context: CallContext
    ) -> None:
        self._state.require_role("Prefill")
        self._state.require_accepting()
        asked = prefill_request_from_proto(request)
        timeout = limit_timeout(asked.timeout, remaining(context))
        asked = msgspec.structs.replace(asked, timeout=timeout)
        await self._serve(
            lambda stream_id: StartPrefill(stream_id=stream_id, request=asked),
            context,
            timeout,
            prefill_event_to_proto,
        )

    async def Link(  # type: ignore[override]  # see the class
        self, request_iterator: AsyncIterator[worker_pb2.LinkFrame], context: CallContext
    ) -> None:
        self._state.require_role("Link")
        self._state.require_accepting()
        await self._links.serve(request_iterator, context.write)

    async def Watch(  # type: ignore[override]  # see the class
        self, request_iterator: AsyncIterator[worker_pb2.WatchRequest], context: CallContext
    ) -> None:
        await self._watches.serve(request_iterator, context.write)

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: CallContext
    ) -> worker_pb2.DrainResponse:
        self._state.require_engine()
        self._drain()
        return worker_pb2.DrainResponse()

    async def CaptureProfile(
        self, request: worker_pb2.CaptureProfileRequest, context: CallContext
    ) -> worker_pb2.CaptureProfileResponse:
        self._state.require_engine()
        steps = request.num_steps
        seconds = request.seconds if request.HasField("seconds") else PROFILE_SECONDS
        if not 1 <= steps <= MAX_PROFILE_STEPS:
            raise InvalidRequestError(
                f"num_steps is {steps}; expected a whole number from 1 to {MAX_PROFILE_STEPS}"
            )
        if not 0 < seconds <= MAX_PROFILE_SECONDS:
            raise InvalidRequestError(
                f"seconds is {seconds}; expected more than 0 and at most {MAX_PROFILE_SECONDS}"
            )
        result = await self._commands.run(
            lambda number: CaptureProfile(command_id=number, num_steps=steps, seconds=seconds),
            seconds + PROFILE_GRACE,
        )
        assert isinstance(result, ProfileCaptured)
        return worker_pb2.CaptureProfileResponse(
            steps=result.steps, table=result.table, trace=result.trace
        )

    async def InjectFault(
        self, request: worker_pb2.InjectFaultRequest, context: CallContext
    ) -> worker_pb2.InjectFaultResponse:
        self._state.require_engine()
        if request.kind not in FAULTS or not 0 <= request.amount <= MAX_FAULT:
            raise InvalidRequestError(
                f"fault {request.kind[:20]!r} of {request.amount} cannot be injected; expected one "
                f"of {', '.join(FAULTS)}, of 0 to {MAX_FAULT:g}"
            )
        result = await self._commands.run(
            lambda number: InjectFault(command_id=number, kind=request.kind, amount=request.amount),
            FAULT_SECONDS,
        )
        assert isinstance(result, FaultInjected)
        if not result.injected:
            raise UnsupportedError(
                f"worker {self._state.worker_id} takes no faults; start it with --fault-injection"
            )
        return worker_pb2.InjectFaultResponse()

    async def _serve(
        self,
        start: Callable[[int], ToEngine],
        context: CallContext,
        seconds: float | None,
        encode: Encode,
    ) -> None:
        deadline = None if seconds is None else self._clock() + seconds
        with self._streams.open(start) as stream:
            try:
                await carry(stream, context, encode)
            finally:
                if deadline is not None and self._clock() >= deadline:
                    stream.end_reason = FinishReason.DEADLINE


async def carry(stream: RequestStream, context: CallContext, encode: Encode) -> None:
    """Write a stream's events until its last; raises the error of a failed one."""
    while True:
        for event in await stream.take():
            match event:
                case FailedEvent():
                    raise error_from_status(event.error)
                case PrefillDoneEvent():
                    return
                case _:
                    await context.write(encode(event))
                    if is_last(event):
                        return


def remaining(context: CallContext) -> float | None:
    """Seconds until the call's own deadline; None when it has none."""
    return context.time_remaining()
