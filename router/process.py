"""A router process from its configuration to its exit. Knows nothing about single requests."""

from __future__ import annotations

import gc
import logging
import os

from prometheus_client import CollectorRegistry

import tasuki
from router.config import RouterConfig
from router.gauges import follow
from router.placement import PlacementPolicy
from router.placer import Placer
from router.recorder import Recorder
from router.request_stream import RouterParts
from router.served_model import ServedModel
from router.service import InferenceService
from router.workers.registry import Registry
from router.workers.watched_worker import WatchLimits
from tasuki.clock import monotonic
from tasuki.config import effective
from tasuki.metrics import RouterMetrics
from tasuki.server.grpc_server import GrpcServer, internal_channel
from tasuki.server.http_page import HttpPage
from tasuki.server.lifecycle import Lifecycle, ReadyLine, StopCause, log_effective, write_ready_line
from tasuki.v1 import common_pb2, inference_pb2, inference_pb2_grpc

log = logging.getLogger(__name__)


class Router:
    """All parts of one router. Make it on a running event loop, `start`, `stop`."""

    def __init__(self, config: RouterConfig, model: ServedModel) -> None:
        self.config = config
        self.model = model
        self.metrics = RouterMetrics(CollectorRegistry())
        self.registry = Registry(
            prefill_addresses=config.prefill_addresses,
            decode_addresses=config.decode_addresses,
            model_id=model.model_id,
            limits=WatchLimits(connect=config.connect_timeout, report=config.report_timeout),
            connect=internal_channel,
        )
        self.placer = Placer(
            self.registry,
            PlacementPolicy(config.split_min_tokens, config.max_candidates),
            max_queue=config.max_queue,
            queue_timeout=config.queue_timeout,
            clock=monotonic,
        )
        parts = RouterParts(
            self.placer,
            Recorder(self.metrics, config.setup),
            model.tokenizer,
            model.vocab_size,
            monotonic,
            config.max_migrations,
        )
        self.service = InferenceService(config, model, self.registry, parts)
        services = [inference_pb2.DESCRIPTOR.services_by_name["Inference"]]
        self.grpc = GrpcServer(services, self.describe, self.registry.reset_prefix_caches)
        self.page = HttpPage(self.metrics.registry, self.why_not_ready)
        inference_pb2_grpc.add_InferenceServicer_to_server(self.service, self.grpc.server)
        follow(self.metrics, self.registry, self.placer, monotonic)
        self.registry.subscribe(self.placer.pump)
        self.registry.subscribe(self._follow_readiness)
        self.metrics.build({"version": tasuki.__version__, "role": "router"})

    async def start(self) -> None:
        """Listen and follow the workers. Raises ConfigError for a port that cannot be had."""
        try:
            # the page first: a gRPC port that is bound and never served is not given back
            await self.page.start(self.config.host, self.config.metrics_port)
            self.grpc.bind(self.config.host, self.config.port)
            await self.registry.start()
            await self.grpc.start()
        except BaseException:
            await self.stop(grace=0.0)
            raise

    async def stop(self, grace: float) -> None:
        """Refuse new requests, give running ones `grace` seconds, return everything."""
        self.service.drain()
        await self.grpc.stop(grace)
        await self.page.close()
        self.placer.close()
        await self.registry.close()

    def why_not_ready(self) -> str | None:
        """None when requests can be placed."""
        if self.service.draining:
            return "draining"
        return None if self.registry.has_decode_worker else "no decode worker is ready"

    def describe(self) -> common_pb2.GetServerInfoResponse:
        facts = {
            "model": self.model.model_id,
            "setup": self.config.setup,
            "capacity": str(self.service.capacity),
            "ready": "false" if self.why_not_ready() else "true",
            **self.registry.facts(),
        }
        return common_pb2.GetServerInfoResponse(
            role=common_pb2.ROLE_ROUTER,
            version=tasuki.__version__,
            pid=os.getpid(),
            metrics_address=self.page.address,
            config=effective(self.config),
            facts=facts,
        )

    @property
    def ready_line(self) -> ReadyLine:
        return ReadyLine(
            role="router",
            worker_id="",
            address=self.grpc.address,
            metrics=self.page.address,
            pid=os.getpid(),
            engine_pid=0,
        )

    def _follow_readiness(self) -> None:
        self.grpc.health.set_serving(self.why_not_ready() is None)


async def run(config: RouterConfig) -> int:
    """Serve until told to stop; returns the exit status. Raises ConfigError or ModelError."""
    log_effective(config)
    with Lifecycle(lifeline_fd=config.lifeline_fd) as lifecycle:
        recommended = config.generation_config == "auto"
        model = ServedModel.from_directory(config.model, recommended=recommended)
        router = Router(config, model)
        await router.start()
        # what start-up made lives as long as the process: no collection need look at it again
        gc.collect()
        gc.freeze()
        write_ready_line(config.ready_fd, router.ready_line)
        log.info("listening on %s, metrics on %s", router.grpc.address, router.page.address)
        cause = await lifecycle.wait_stop()
        await router.stop(config.drain_timeout if cause is StopCause.DRAIN else 0.0)
    return 0
