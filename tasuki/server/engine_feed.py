"""Reads everything an engine says and hands each message to the one who waits for it.

One task and one reader: the order of the engine's messages is kept, and nothing here blocks.
"""

from __future__ import annotations

import logging

from tasuki.errors import TasukiError
from tasuki.messages import (
    CallPrefill,
    CancelPrefillCall,
    CloseLink,
    EngineClient,
    EngineFailed,
    FaultInjected,
    FromEngine,
    LinkSend,
    LoadReport,
    MetricSamples,
    OpenLink,
    PrefixCacheReset,
    ProfileCaptured,
    StreamEvents,
)
from tasuki.metrics import WorkerMetrics
from tasuki.server.engine_commands import EngineCommands
from tasuki.server.link_streams import LinkStreams
from tasuki.server.prefill_calls import PrefillCalls
from tasuki.server.request_streams import RequestStreams
from tasuki.server.watch import WatchStreams

log = logging.getLogger(__name__)


class EngineFeed:
    def __init__(
        self,
        engine: EngineClient,
        *,
        streams: RequestStreams,
        calls: PrefillCalls,
        links: LinkStreams,
        watches: WatchStreams,
        commands: EngineCommands,
        metrics: WorkerMetrics,
    ) -> None:
        self._engine = engine
        self._streams = streams
        self._calls = calls
        self._links = links
        self._watches = watches
        self._commands = commands
        self._metrics = metrics
        self._wrong_metrics: set[str] = set()

    async def run(self) -> str:
        """Read until the engine ends; returns its last words on why, or an empty string."""
        last_words = ""
        async for message in self._engine.receive():
            if isinstance(message, EngineFailed):
                last_words = message.error.message
            else:
                self._dispatch(message)
        return last_words

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case StreamEvents():
                self._streams.deliver(message)
            case LinkSend():
                self._links.send(message)
            case LoadReport():
                self._watches.report(message)
            case MetricSamples():
                self._apply(message)
            case CallPrefill() | CancelPrefillCall():
                self._dispatch_call(message)
            case OpenLink():
                self._links.open(message)
            case CloseLink():
                self._links.end(message)
            case PrefixCacheReset() | ProfileCaptured() | FaultInjected():
                self._commands.deliver(message)
            case _:
                log.error("the engine said %s out of turn", type(message).__name__)

    def _dispatch_call(self, message: CallPrefill | CancelPrefillCall) -> None:
        if isinstance(message, CallPrefill):
            self._calls.call(message)
        else:
            self._calls.cancel(message.handoff_id)

    def _apply(self, message: MetricSamples) -> None:
        """A metric that does not exist is a bug of the engine, logged once and survived."""
        for sample in message.samples:
            try:
                self._metrics.apply(sample)
            except TasukiError as error:
                if sample.name not in self._wrong_metrics:
                    self._wrong_metrics.add(sample.name)
                    log.error("%s", error.message)
