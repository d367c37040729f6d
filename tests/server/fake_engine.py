"""An EngineClient without an engine: records what it is told, says what the test scripts.

It speaks the same messages as the real one, over the same seam.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from tasuki.config import WorkerConfig
from tasuki.errors import TasukiError
from tasuki.messages import (
    DecodeEvent,
    EngineFailed,
    EngineReady,
    ErrorStatus,
    FinishedEvent,
    FinishReason,
    FromEngine,
    HandoffTimings,
    LayoutDescription,
    LoadReport,
    PrefillEvent,
    Role,
    SamplingParams,
    StreamEvent,
    StreamEvents,
    ToEngine,
    TokensEvent,
)
from tests.waiting import until

M = TypeVar("M")
LAYOUT = LayoutDescription(
    model_id="tiny", weights_digest="0f" * 8, dtype="float32", num_layers=2, num_kv_heads=2,
    head_dim=8, block_size=16, layout_version="block-major-1", numerics="fake,float32",
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, seed=7)


class FakeEngine:
    """`heard` is everything the server said; `say` and `die` are the engine's own doing."""

    def __init__(
        self, config: WorkerConfig, *, epoch: int = 0xABC, fail_start: TasukiError | None = None
    ) -> None:
        self.config = config
        self.epoch = epoch
        self.heard: list[ToEngine] = []
        self.answer: Callable[[ToEngine], list[FromEngine]] = lambda message: []
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.closed = False
        self._fail_start = fail_start
        self._said: asyncio.Queue[FromEngine | None] = asyncio.Queue()

    # --- the seam -------------------------------------------------------------------------------

    async def start(self) -> EngineReady:
        await self.may_start.wait()
        if self._fail_start is not None:
            raise self._fail_start
        return EngineReady(
            worker_epoch=self.epoch,
            engine_pid=os.getpid(),
            layout=LAYOUT,
            num_blocks=64,
            block_bytes=4096,
            max_model_len=256,
            vocab_size=100,
            facts={"torch": "none", "linears": "fake"},
        )

    def send(self, message: ToEngine) -> None:
        self.heard.append(message)
        for reply in self.answer(message):
            self.say(reply)

    async def receive(self) -> AsyncIterator[FromEngine]:
        while (message := await self._said.get()) is not None:
            yield message

    async def close(self) -> None:
        self.closed = True
        self._said.put_nowait(None)

    # --- for tests ------------------------------------------------------------------------------

    def say(self, message: FromEngine) -> None:
        self._said.put_nowait(message)

    def emit(self, stream_id: int, *events: DecodeEvent | PrefillEvent) -> None:
        """All events in one frame."""
        self.say(
            StreamEvents(events=[StreamEvent(stream_id=stream_id, event=event) for event in events])
        )

    def die(self, last_words: str = "") -> None:
        if last_words:
            status = ErrorStatus(code="INTERNAL", reason="internal", message=last_words)
            self.say(EngineFailed(error=status))
        self._said.put_nowait(None)

    def all(self, kind: type[M]) -> list[M]:
        """What it was told of one kind, in order."""
        return [message for message in self.heard if isinstance(message, kind)]

    async def wait_for(self, kind: type[M], count: int = 1) -> M:
        """The `count`-th message of one kind, once it has come."""
        await until(lambda: len(self.all(kind)) >= count, f"{count} x {kind.__name__}")
        return self.all(kind)[count - 1]


def tokens(index: int, *token_ids: int) -> TokensEvent:
    return TokensEvent(index=index, token_ids=list(token_ids), offsets=[0.5] * len(token_ids))


def finished(output_tokens: int = 3) -> FinishedEvent:
    return FinishedEvent(
        finish_reason=FinishReason.LENGTH,
        prompt_tokens=2,
        output_tokens=output_tokens,
        cached_tokens=0,
        computed_prompt_tokens=2,
        handoff=HandoffTimings(),
    )


def load_report(engine: FakeEngine, role: Role, *, free_blocks: int = 60) -> LoadReport:
    return LoadReport(
        worker_id=engine.config.worker_id,
        worker_epoch=engine.epoch,
        role=role,
        ready=True,
        draining=False,
        free_blocks=free_blocks,
        total_blocks=64,
        queued_tokens=3,
        running=1,
        waiting=2,
        prefill_tokens_per_second=1000.0,
        links=[],
    )
