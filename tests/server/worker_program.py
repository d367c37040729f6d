"""A worker process with a scripted engine: `python -m tests.server.worker_program` plus flags.

The request id is the script: "die" ends the engine, "hang" says one token and no more, any other is
answered with two tokens. The model names how the start goes: "missing" fails, "slow" never ends.
"""

from __future__ import annotations

import asyncio
import sys

from tasuki import config as configuration
from tasuki.config import WorkerConfig
from tasuki.errors import ModelError
from tasuki.messages import FromEngine, Role, StartDecode, StreamEvent, StreamEvents, ToEngine
from tasuki.server.worker import serve_worker
from tests.server.fake_engine import FakeEngine, finished, tokens


def make_engine(config: WorkerConfig) -> FakeEngine:
    fail = (
        ModelError(f"{config.model} is no model directory") if config.model == "missing" else None
    )
    engine = FakeEngine(config, fail_start=fail)
    if config.model == "slow":
        engine.may_start.clear()

    def answer(message: ToEngine) -> list[FromEngine]:
        if not isinstance(message, StartDecode):
            return []
        if message.request.request_id == "die":
            engine.die("told to")
            return []
        events = [StreamEvent(stream_id=message.stream_id, event=tokens(0, 7))]
        if message.request.request_id != "hang":
            events.append(StreamEvent(stream_id=message.stream_id, event=finished(1)))
        return [StreamEvents(events=events)]

    engine.answer = answer
    return engine


if __name__ == "__main__":
    settings = configuration.load(WorkerConfig, "worker_program", "For tests.")
    sys.exit(asyncio.run(serve_worker(Role.DECODE, settings, make_engine)))
