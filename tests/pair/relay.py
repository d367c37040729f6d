"""A prefill and a decode engine in this process, tied over loopback, and what passes between.

Runs the product's cores, loops and links; only the wire between the two servers is replaced, by
handing each message over. Faults are planted in the loopback connector.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from decode.core import DecodeCore
from prefill.core import PrefillCore
from tasuki.config import WorkerConfig
from tasuki.engine.core import Host
from tasuki.engine.engine import Engine
from tasuki.engine.inline_client import InlineEngineClient
from tasuki.messages import (
    CallPrefill,
    CancelPrefillCall,
    CancelStream,
    CloseLink,
    DecodeRequest,
    FailedEvent,
    FallbackEvent,
    FinishedEvent,
    FinishReason,
    FirstTokenEvent,
    FromEngine,
    KnownPrefillWorkers,
    LinkEnded,
    LinkReceived,
    LinkSend,
    LinkStarted,
    LoadReport,
    LocalEvent,
    MetricSamples,
    OpenLink,
    PrefillCallEnded,
    PrefillDoneEvent,
    PrefillReply,
    PrefillTarget,
    SamplingParams,
    StartDecode,
    StartPrefill,
    StreamEvents,
    TokenLogprob,
    TokensEvent,
)
from tasuki.transfer.connector import Connector
from tasuki.transfer.connectors.loopback import LoopbackConnector
from tasuki.transfer.connectors.loopback_fault import PlannedFault

DEADLINE = 30.0


@dataclasses.dataclass
class Outcome:
    token_ids: list[int]
    finished: FinishedEvent | None = None
    failed: FailedEvent | None = None
    fallback: str = ""
    local: str = ""
    kept_tokens: int = 0  # of a fallback
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    computed_prompt_tokens: int = 0  # as the first tokens said


class InlinePair:
    """Both engines and what passes between them."""

    def __init__(
        self, model: Path, fault: PlannedFault | None, prefill: dict[str, Any], **settings: Any
    ) -> None:
        """`settings` are those of both workers, `prefill` those of one. Without prefix caches
        unless asked for: what was asked before would not travel again.
        """
        connector = LoopbackConnector(fault)
        base = WorkerConfig(
            model=str(model), max_num_batched_tokens=64, segment_bytes=1, prefix_caching=False
        )
        base = dataclasses.replace(base, **settings)
        self.cores: dict[str, PrefillCore | DecodeCore] = {}
        self.prefill = self._engine("prefill", dataclasses.replace(base, **prefill), connector)
        self.decode = self._engine("decode", base, connector)
        self.metrics: dict[str, float] = {}
        self.reports: dict[str, LoadReport] = {}
        self.changed = asyncio.Condition()
        self.first_tokens: list[FirstTokenEvent] = []  # as the prefill worker told them
        self.first_tokens_passed_on = 64
        self.rewritten: Callable[[FirstTokenEvent], FirstTokenEvent] = lambda event: event
        self.is_lost: Callable[[Any], bool] = lambda message: False  # what is never passed on
        self.streams: dict[int, asyncio.Queue[Any]] = {}
        self._handoff_of: dict[int, str] = {}
        self._next_stream = 0

    def _engine(self, role: str, base: WorkerConfig, connector: Connector) -> InlineEngineClient:
        core = PrefillCore if role == "prefill" else DecodeCore
        config = dataclasses.replace(base, worker_id=role)

        def make(engine: Engine, config: WorkerConfig, epoch: int, host: Host) -> Any:
            self.cores[role] = core(engine, config, epoch, host, connector)
            return self.cores[role]

        return InlineEngineClient(config, make, allocate_whole_prompt=role == "prefill")

    async def start(self) -> None:
        ready = await self.prefill.start()
        await self.decode.start()
        self._tasks = [
            asyncio.create_task(self._follow("prefill", self.prefill)),
            asyncio.create_task(self._follow("decode", self.decode)),
        ]
        self.target = PrefillTarget(
            worker_id="prefill", worker_epoch=ready.worker_epoch, address="here"
        )
        self.decode.send(KnownPrefillWorkers(workers=[self.target]))
        await self.until_linked()

    async def until_linked(self) -> None:
        await self.until(lambda: any(r.state == "open" for r in self.reports["decode"].links))

    async def close(self) -> None:
        await self.decode.close()
        await self.prefill.close()
        await asyncio.gather(*self._tasks)

    async def until(self, wanted: Any) -> None:
        """Wait for something to become true as messages pass."""

        def holds() -> bool:
            return len(self.reports) == 2 and wanted()

        async with asyncio.timeout(DEADLINE), self.changed:
            await self.changed.wait_for(holds)

    async def _follow(self, role: str, engine: InlineEngineClient) -> None:
        async for message in engine.receive():
            self._pass_on(role, message)
            async with self.changed:
                self.changed.notify_all()

    def _pass_on(self, role: str, message: FromEngine) -> None:
        match message:
            case StreamEvents():
                for item in message.events:
                    self._stream_event(role, item.stream_id, item.event)
            case LoadReport():
                self.reports[role] = message
            case MetricSamples():
                for sample in message.samples:
                    name = f"{role} {sample.name} {' '.join(sample.labels.values())}".strip()
                    grown = self.metrics.get(name, 0.0) if sample.op == "inc" else 0.0
                    self.metrics[name] = grown + sample.value
            case CallPrefill():
                self._next_stream += 1
                self._handoff_of[self._next_stream] = message.request.handoff_id
                self.prefill.send(
                    StartPrefill(stream_id=self._next_stream, request=message.request)
                )
            case CancelPrefillCall():
                self._cancel_call(message.handoff_id)
            case _:
                self._pass_on_link(self.decode if role == "prefill" else self.prefill, message)

    def _cancel_call(self, handoff_id: str) -> None:
        for stream_id, known in self._handoff_of.items():
            if known == handoff_id:
                self.prefill.send(CancelStream(stream_id=stream_id, reason=FinishReason.CANCELLED))

    def _pass_on_link(self, other: InlineEngineClient, message: FromEngine) -> None:
        match message:
            case OpenLink():
                other.send(LinkStarted(link_id=message.link_id))
            case LinkSend():
                if self.is_lost(message):
                    return
                other.send(LinkReceived(link_id=message.link_id, message=message.message))
            case CloseLink():
                other.send(LinkEnded(link_id=message.link_id, error=message.error))
            case _:
                raise AssertionError(message)

    def _stream_event(self, role: str, stream_id: int, event: Any) -> None:
        if role == "decode":
            self.streams[stream_id].put_nowait(event)
            return
        handoff_id = self._handoff_of[stream_id]
        if isinstance(event, FirstTokenEvent):
            self.first_tokens.append(event)
            if self.is_lost(event):
                return
            few = event.token_ids[: self.first_tokens_passed_on]
            event = self.rewritten(msgspec.structs.replace(event, token_ids=few))
        if isinstance(event, FailedEvent | PrefillDoneEvent):
            del self._handoff_of[stream_id]
            error = event.error if isinstance(event, FailedEvent) else None
            self.decode.send(PrefillCallEnded(handoff_id=handoff_id, error=error))
        else:
            self.decode.send(PrefillReply(handoff_id=handoff_id, event=event))

    @property
    def handoff_ids(self) -> list[str]:
        """Of the calls that the prefill worker has not ended."""
        return list(self._handoff_of.values())

    async def ask(self, prompt: list[int], **how: Any) -> Outcome:
        """One request of one sample to its end."""
        (outcome,) = await self.ask_samples(prompt, **how)
        return outcome

    async def ask_samples(
        self,
        prompt: list[int],
        *,
        split: bool = True,
        tries: int = 1,
        given: Sequence[int] = (),
        cache_salt: str = "",
        **sampling: Any,
    ) -> list[Outcome]:
        """One request to its end; the prefill worker is named as its candidate `tries` times.
        `given` are output tokens of another decode worker. What is said of the whole request is in
        the first outcome.
        """
        self._next_stream += 1
        stream_id = self._next_stream
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self.streams[stream_id] = queue
        wanted = {"max_tokens": 64, "ignore_eos": True} | sampling
        request = DecodeRequest(
            request_id=f"r{stream_id}",
            prompt_token_ids=prompt,
            output_token_ids=list(given),
            sampling=SamplingParams(**wanted),
            prefill_candidates=[self.target] * tries if split else [],
            cache_salt=cache_salt,
        )
        self.decode.send(StartDecode(stream_id=stream_id, request=request))
        outcomes = [Outcome(list(given)) for _ in range(request.sampling.n)]
        first = outcomes[0]
        async with asyncio.timeout(DEADLINE):
            while first.failed is None and any(one.finished is None for one in outcomes):
                match await queue.get():
                    case TokensEvent() as event:
                        outcome = outcomes[event.sample_index]
                        assert outcome.finished is None
                        assert event.index == len(outcome.token_ids)
                        outcome.token_ids += event.token_ids
                        outcome.logprobs += event.logprobs
                        outcome.computed_prompt_tokens += event.computed_prompt_tokens
                        outcome.prompt_logprobs += event.prompt_logprobs
                    case FallbackEvent() as event:
                        first.fallback, first.kept_tokens = event.reason, event.kept_tokens
                    case LocalEvent() as event:
                        first.local = event.reason
                    case FinishedEvent() as event:
                        outcomes[event.sample_index].finished = event
                        left = sum(one.finished is None for one in outcomes)
                        assert event.samples_left == left
                    case FailedEvent() as event:
                        first.failed = event
        return outcomes

    async def until_idle(self) -> None:
        """Wait until both engines have nothing left; their invariants must hold all the time."""
        for core in self.cores.values():
            async with asyncio.timeout(DEADLINE):
                while not await self._on_control_thread(core, partial(is_idle, core)):
                    pass

    async def _on_control_thread(
        self, core: PrefillCore | DecodeCore, look: Callable[[], bool]
    ) -> bool:
        """Run `look` where the core runs, under its lock."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        loop = answer.get_loop()

        def run() -> None:
            try:
                loop.call_soon_threadsafe(answer.set_result, look())
            except AssertionError as error:
                loop.call_soon_threadsafe(answer.set_exception, error)

        core.host.call_soon(run)
        return await answer


def is_idle(core: PrefillCore | DecodeCore) -> bool:
    core.check_integrity()
    blocks = core.engine.blocks
    home = blocks.num_free == blocks.pool.num_blocks
    return home and core.is_idle and not core.engine.has_work


@contextlib.asynccontextmanager
async def inline_pair(
    model: Path,
    fault: PlannedFault | None = None,
    prefill: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[InlinePair]:
    pair = InlinePair(model, fault, prefill or {}, **settings)
    await pair.start()
    try:
        yield pair
    finally:
        await pair.close()
