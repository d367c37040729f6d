"""A worker as a router meets it, over real gRPC: reports as told, decodes by a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tasuki.errors import UnsupportedError
from tasuki.messages import (
    DecodeRequest,
    DispatchedEvent,
    FinishedEvent,
    FinishReason,
    FirstTokenParts,
    HandoffTimings,
    LinkReport,
    LoadReport,
    LocalEvent,
    PrefillTarget,
    Role,
    TokensEvent,
)
from tasuki.server.grpc_server import GrpcServer
from tasuki.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tasuki.wire.decode import (
    WireDecodeEvent,
    decode_event_to_proto,
    decode_request_from_proto,
)
from tasuki.wire.watch import WorkerReport, report_to_proto, watch_request_from_proto

Script = Callable[[DecodeRequest], AsyncIterator[WireDecodeEvent]]
MODEL_ID = "fake-model"


def tokens(index: int, *ids: int, parts: FirstTokenParts | None = None) -> TokensEvent:
    offsets = [0.001 * (index + i) for i in range(len(ids))]
    if index == 0 and parts is None:
        parts = FirstTokenParts()
    return TokensEvent(index=index, token_ids=list(ids), offsets=offsets, parts=parts)


def finished(
    request: DecodeRequest, count: int, reason: FinishReason = FinishReason.LENGTH, **changes: Any
) -> FinishedEvent:
    values: dict[str, Any] = dict(
        finish_reason=reason,
        prompt_tokens=len(request.prompt_token_ids),
        output_tokens=count,
        cached_tokens=0,
        computed_prompt_tokens=0 if request.prefill_candidates else len(request.prompt_token_ids),
        handoff=HandoffTimings(),
    )
    return FinishedEvent(**(values | changes))


def place_event(request: DecodeRequest) -> DispatchedEvent | LocalEvent:
    if request.prefill_candidates:
        return DispatchedEvent(prefill_worker_id=request.prefill_candidates[0].worker_id)
    return LocalEvent(reason=request.local_reason)


async def spell(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
    """The default script: the ids 65, 66, ... (A, B, ...), one a message, as many as asked for and
    not there yet; of every sample in turn, each beginning one letter later than the one before.
    """
    yield place_event(request)
    n = request.sampling.n
    samples = range(n) if n > 1 else [request.sample_index]
    for index in range(len(request.output_token_ids), request.sampling.max_tokens):
        for sample in samples:
            event = tokens(index, 65 + (index + sample) % 26)
            yield msgspec.structs.replace(event, sample_index=sample)
    for left, sample in zip(reversed(range(len(samples))), samples, strict=True):
        yield finished(request, request.sampling.max_tokens, sample_index=sample, samples_left=left)


@dataclass(eq=False)
class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """`load` is what it reports; change it with `report`. Everything it saw is kept."""

    role: Role
    worker_id: str
    script: Script = spell
    block_size: int = 16
    max_model_len: int = 2048
    model_id: str = MODEL_ID
    load: LoadReport = field(init=False)
    address: str = ""
    decodes: list[DecodeRequest] = field(default_factory=list)
    running: int = 0  # Decode streams open now
    cancelled: int = 0
    targets: list[PrefillTarget] = field(default_factory=list)
    watch_requests: int = 0
    silent: bool = False  # as if its engine were stopped: no reports, not even on a new stream

    def __post_init__(self) -> None:
        self.load = LoadReport(
            worker_id=self.worker_id,
            worker_epoch=11 if self.role is Role.PREFILL else 22,
            role=self.role,
            ready=True,
            draining=False,
            free_blocks=128,
            total_blocks=128,
            queued_tokens=0,
            running=0,
            waiting=0,
            prefill_tokens_per_second=0.0,
            links=[],
        )
        self.resets = 0
        self._changed = asyncio.Condition()
        self._version = 0
        self._server: GrpcServer | None = None

    async def start(self, port: int = 0) -> None:
        services = [worker_pb2.DESCRIPTOR.services_by_name["Worker"]]
        self._server = GrpcServer(services, common_pb2.GetServerInfoResponse, self._reset)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server.server)
        self.address = self._server.bind("127.0.0.1", port)
        await self._server.start()

    async def stop(self) -> None:
        """Die: all streams end at once."""
        if self._server is not None:
            await self._server.stop(0.0)
            self._server = None

    async def _reset(self) -> int:
        self.resets += 1
        return 5

    async def report(self, **changes: Any) -> None:
        """Change the load and send a report (also with no change)."""
        values = {name: getattr(self.load, name) for name in self.load.__struct_fields__}
        async with self._changed:
            self.load = LoadReport(**(values | changes))
            self._version += 1
            self._changed.notify_all()

    async def link_to(self, *prefills: FakeWorker) -> None:
        links = [
            LinkReport(
                worker_id=prefill.worker_id, worker_epoch=prefill.load.worker_epoch, state="open"
            )
            for prefill in prefills
        ]
        await self.report(links=links)

    async def Decode(
        self, request: worker_pb2.DecodeRequest, context: Any
    ) -> AsyncIterator[worker_pb2.DecodeEvent]:
        asked = decode_request_from_proto(request)
        self.decodes.append(asked)
        self.running += 1
        try:
            async for event in self.script(asked):
                yield decode_event_to_proto(event)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def Watch(
        self, request_iterator: AsyncIterator[worker_pb2.WatchRequest], context: Any
    ) -> AsyncIterator[worker_pb2.LoadReport]:
        reader = asyncio.create_task(self._read_targets(request_iterator))
        try:
            while True:
                seen = self._version
                report = WorkerReport(
                    load=self.load,
                    block_size=self.block_size,
                    max_model_len=self.max_model_len,
                    model_id=self.model_id,
                )
                if not self.silent:
                    yield report_to_proto(report)
                async with self._changed:
                    while self._version == seen:
                        await self._changed.wait()
        finally:
            reader.cancel()

    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[Any]:
        raise UnsupportedError("a router does not call Prefill")
        yield

    async def Link(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        raise UnsupportedError("a router does not call Link")
        yield

    async def Drain(self, request: Any, context: Any) -> Any:
        raise UnsupportedError("this router does not call Drain")

    async def InjectFault(self, request: Any, context: Any) -> Any:
        raise UnsupportedError("this router does not call InjectFault")

    async def CaptureProfile(self, request: Any, context: Any) -> Any:
        raise UnsupportedError("this router does not call CaptureProfile")

    async def _read_targets(self, requests: AsyncIterator[worker_pb2.WatchRequest]) -> None:
        async for request in requests:
            self.targets = watch_request_from_proto(request)
            self.watch_requests += 1


async def wait_until(holds: Callable[[], bool], what: str, seconds: float = 5.0) -> None:
    """Wait for a condition; fail in words at the deadline."""
    try:
        async with asyncio.timeout(seconds):
            while not holds():  # noqa: ASYNC110  # any condition, not one that tells of itself
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within {seconds} s: {what}") from None


async def within(awaitable: Awaitable[Any], seconds: float = 10.0) -> Any:
    async with asyncio.timeout(seconds):
        return await awaitable
