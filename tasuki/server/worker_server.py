"""The server process of a worker, put together: what it owns, how it starts, drains and ends.

1. bind the gRPC port, which fixes the worker's address and name; answer health and probes;
2. start the engine; when it is warm, take work;
3. when the engine ends, end every stream at once, say so everywhere, and start another one: it has
   a new epoch, and nothing of the old one is ever mixed up with it;
4. draining takes no new work; closing ends the engine first, so that its links can say goodbye.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable
from typing import TypeAlias

from prometheus_client import CollectorRegistry

from tasuki import __version__
from tasuki import config as configuration
from tasuki.clock import monotonic
from tasuki.config import WorkerConfig
from tasuki.errors import EngineDiedError, TasukiError, UnavailableError
from tasuki.messages import (
    BeginDrain,
    EngineClient,
    EngineReady,
    PrefixCacheReset,
    ResetPrefixCache,
    Role,
    ToEngine,
)
from tasuki.metrics import WorkerMetrics
from tasuki.server.address import default_name
from tasuki.server.engine_commands import EngineCommands
from tasuki.server.engine_feed import EngineFeed
from tasuki.server.grpc_server import GrpcServer
from tasuki.server.http_page import HttpPage
from tasuki.server.link_streams import LinkStreams
from tasuki.server.peer_channels import PeerChannels
from tasuki.server.prefill_calls import PrefillCalls
from tasuki.server.request_streams import RequestStreams
from tasuki.server.restarts import RestartBudget
from tasuki.server.watch import EXPIRY_SECONDS, WatchStreams
from tasuki.server.worker_service import WorkerService
from tasuki.server.worker_state import WorkerState
from tasuki.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tasuki.wire.values import role_to_proto

RESET_SECONDS = 5.0  # the engine answers between two steps
STOP_GRACE = 0.5  # seconds for the last statuses to leave
log = logging.getLogger(__name__)

EngineFactory: TypeAlias = Callable[[WorkerConfig], EngineClient]
"""Makes the engine, given the configuration with the bound port and the final worker_id."""


class WorkerServer:
    """Make it on an event loop, `start`, `drain`, `close`; `ended` is set when the engine ended and
    is not started again.
    """

    def __init__(self, role: Role, config: WorkerConfig, make_engine: EngineFactory) -> None:
        """Bind the gRPC port and make the engine. Raises ConfigError when the port is taken."""
        self.metrics = WorkerMetrics(role, CollectorRegistry())
        services = [worker_pb2.DESCRIPTOR.services_by_name["Worker"]]
        self.grpc = GrpcServer(services, self._describe, self._reset_prefix_cache)
        address = self.grpc.bind(config.host, config.port)
        config = dataclasses.replace(
            config,
            port=self.grpc.port,
            worker_id=config.worker_id or default_name(config.host, self.grpc.port),
        )
        self._make_engine = make_engine
        self.engine = make_engine(config)
        send = self._send
        self.state = WorkerState(role, config, address)
        self.page = HttpPage(self.metrics.registry, self.state.why_not_ready)
        self.channels = PeerChannels()
        self.streams = RequestStreams(send)
        self.calls = PrefillCalls(self.channels, send)
        self.links = LinkStreams(self.channels, send, config.link_timeout)
        self.watches = WatchStreams(self.state, send)
        self.commands = EngineCommands(send)
        self.ended = asyncio.Event()
        self._restarts = RestartBudget(config.engine_restarts)
        self._stopping: UnavailableError | None = None  # set once `close` has begun
        self._tasks: list[asyncio.Task[None]] = []
        service = WorkerService(
            self.state,
            self.streams,
            self.links,
            self.watches,
            self.commands,
            self.begin_drain,
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(service, self.grpc.server)

    async def start(self) -> EngineReady:
        """Answer health at once, and everything else when the engine is warm.

        Raises what the start of the engine raised, or ConfigError for the metrics port.
        """
        config = self.state.config
        await self.page.start(config.host, config.metrics_port)
        await self.grpc.start()
        ready = await self.engine.start()
        self.metrics.build(self._build_facts(ready))
        self._begin_serving(ready)
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._tick())]
        return ready

    def _send(self, message: ToEngine) -> None:
        """To the engine of the moment; what was meant for an older one finds nobody there."""
        self.engine.send(message)

    def _begin_serving(self, ready: EngineReady) -> None:
        self.state.engine, self.state.end = ready, None
        self.grpc.health.set_serving(self.state.why_not_ready() is None)

    def begin_drain(self) -> None:
        """Take no new work and let the engine and all routers know. Idempotent."""
        if self.state.draining:
            return
        self.state.draining = True
        self.grpc.health.set_serving(False)
        self.engine.send(BeginDrain())
        self.watches.wake()

    async def drain(self, seconds: float) -> None:
        """Begin, and wait until what runs has ended, at most so long."""
        self.begin_drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.streams.wait_idle()

    async def close(self) -> None:
        """End everything that is left and return every resource. Idempotent."""
        stopping = self._stopping = UnavailableError(
            f"worker {self.state.worker_id} is stopping; try another", reason="draining"
        )
        self.state.draining = True
        self.grpc.health.set_serving(False)
        self.streams.fail_all(stopping)
        await self.engine.close()
        if self._tasks:
            await asyncio.wait(self._tasks[:1], timeout=STOP_GRACE)  # what the engine said last
        self._end(stopping)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.engine.close()  # one that was being started in place of another
        await self.calls.close()
        await self.links.close()
        await self.grpc.stop(STOP_GRACE)
        await self.page.close()

    # --- while it runs --------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Hand out what engines say; the end of one is the end of all that it owned."""
        try:
            while True:
                last_words = await self._follow_one()
                self._end(self._stopping or self._death(last_words))
                await self.calls.close()
                await self.links.close()
                if self._stopping is not None or not await self._restart():
                    return
        finally:
            self.ended.set()

    async def _follow_one(self) -> str:
        """Until the engine ends; returns its last words."""
        feed = EngineFeed(
            self.engine,
            streams=self.streams,
            calls=self.calls,
            links=self.links,
            watches=self.watches,
            commands=self.commands,
            metrics=self.metrics,
        )
        try:
            return await feed.run()
        except Exception:
            log.exception("what the engine said could not be handled")
            return "its connection broke"

    async def _restart(self) -> bool:
        """Start a new engine in place of one that died; whether there is one now."""
        await self.engine.close()
        if self.state.draining or not self._restarts.take(monotonic()):
            return False
        self.engine = self._make_engine(self.state.config)
        try:
            ready = await self.engine.start()
        except TasukiError as error:
            log.error("the engine could not be started again: %s", error.message)
            return False
        if self._stopping is not None:
            return False
        log.info("a new engine is ready: epoch %016x", ready.worker_epoch)
        self.metrics.engine_restarts_total.inc()
        self.watches.begin_epoch()
        self._begin_serving(ready)
        return True

    def _death(self, last_words: str) -> EngineDiedError:
        words = f": {last_words}" if last_words else ""
        log.error("the engine of worker %s died%s", self.state.worker_id, words)
        return EngineDiedError(
            f"the engine of worker {self.state.worker_id} died{words}; send the request again"
        )

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_SECONDS)
            self.watches.tick()

    def _end(self, error: TasukiError) -> None:
        """End every stream with `error`, and refuse with it from now on. The first error stands."""
        if self.state.end is None:
            self.state.end = error
        self.grpc.health.set_serving(False)
        self.streams.fail_all(self.state.end)
        self.commands.fail_all(self.state.end)
        self.links.fail_served(self.state.end)
        self.watches.wake()

    async def _reset_prefix_cache(self) -> int:
        self.state.require_engine()
        result = await self.commands.run(
            lambda number: ResetPrefixCache(command_id=number), RESET_SECONDS
        )
        assert isinstance(result, PrefixCacheReset)
        return result.blocks

    # --- what it says about itself --------------------------------------------------------------

    def _describe(self) -> common_pb2.GetServerInfoResponse:
        engine = self.state.engine
        return common_pb2.GetServerInfoResponse(
            role=role_to_proto(self.state.role),
            worker_id=self.state.worker_id,
            worker_epoch=engine.worker_epoch if engine else 0,
            version=__version__,
            pid=os.getpid(),
            engine_pid=engine.engine_pid if engine else 0,
            metrics_address=self.page.address,
            config=configuration.effective(self.state.config),
            facts=self._facts(engine) if engine else {},
        )

    def _facts(self, engine: EngineReady) -> dict[str, str]:
        return {
            **engine.facts,
            "model": engine.layout.model_id,
            "weights_digest": engine.layout.weights_digest,
            "numerics": engine.layout.numerics,
            "num_blocks": str(engine.num_blocks),
            "block_bytes": str(engine.block_bytes),
            "max_model_len": str(engine.max_model_len),
            "vocab_size": str(engine.vocab_size),
        }

    def _build_facts(self, engine: EngineReady) -> dict[str, str]:
        layout = engine.layout
        own = {"version": __version__, "role": self.state.role.value}
        return {**engine.facts, "dtype": layout.dtype, "numerics": layout.numerics, **own}
