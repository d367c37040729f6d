"""Several prefill workers are named: one that refuses or dies is replaced by the next."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cli.cluster.cluster_spec import ClusterSpec
from cli.cluster.local_cluster import LocalCluster
from cli.cluster.ready_line import ReadyLine
from tasuki.client import Client
from tasuki.messages import DecodeRequest, PrefillTarget, Role, SamplingParams, TokensEvent
from tasuki.server.grpc_server import internal_channel
from tasuki.v1 import worker_pb2_grpc
from tasuki.wire.decode import decode_event_from_proto, decode_request_to_proto
from tests.integration.faults import BLOCK_BYTES, CRAWL, SLOWABLE, inject
from tests.integration.scrape import assert_no_leaks, scrape, scrape_until
from tests.integration.streams import ask, prompt

pytestmark = [pytest.mark.dist, pytest.mark.asyncio(loop_scope="session")]

PROMPT = prompt(1500, seed="candidates")
BLOCKS = 94


@asynccontextmanager
async def two_prefill_workers(model: Path, **first: Any) -> AsyncIterator[LocalCluster]:
    """The links of the first one are slow, and it may have settings of its own."""
    overrides = {"prefill-0": first, "prefill-1": {}}
    spec = ClusterSpec(model=model, prefill=2, worker=SLOWABLE, overrides=overrides)
    async with LocalCluster(spec) as cluster:
        await cluster.wait_ready()
        await inject(cluster.workers_of(Role.PREFILL)[0], "slow", CRAWL)
        yield cluster
        (decode,) = cluster.workers_of(Role.DECODE)
        await assert_no_leaks(decode.metrics)


async def target(worker: ReadyLine) -> PrefillTarget:
    async with Client(worker.address) as client:
        epoch = (await client.server_info()).worker_epoch
    return PrefillTarget(worker_id=worker.worker_id, worker_epoch=epoch, address=worker.address)


async def test_one_that_dies_is_replaced_by_the_next(
    tiny_model: Path, colocated: LocalCluster
) -> None:
    async with Client(colocated.router_address) as client:
        expected = (await ask(client, PROMPT)).token_ids
    async with two_prefill_workers(tiny_model, max_num_batched_tokens=1) as cluster:
        first, second = cluster.workers_of(Role.PREFILL)
        (decode,) = cluster.workers_of(Role.DECODE)
        assert first.engine_pid is not None
        os.kill(first.engine_pid, signal.SIGSTOP)
        async with Client(cluster.router_address) as client:
            call = asyncio.ensure_future(ask(client, PROMPT))
            while not (await scrape(decode.metrics)).total("kv_received_bytes_total"):
                assert not call.done(), call
                os.kill(first.engine_pid, signal.SIGCONT)
                await asyncio.sleep(0.002)  # a few steps of 1,500
                os.kill(first.engine_pid, signal.SIGSTOP)
            os.kill(first.engine_pid, signal.SIGKILL)
            answer = await call
        assert answer.token_ids == expected
        assert (answer.placement.kind, answer.placement.fallback_reason) == ("split", "")
        assert answer.placement.prefill_worker_id == second.worker_id
        assert answer.placement.decode_computed_prompt_tokens == 0  # what came is kept
        metrics = await scrape(decode.metrics)
        failures = [metrics.total("kv_transfer_failures_total", reason=reason)
                    for reason in ("prefill_died", "link_down")]  # fmt: skip
        assert sum(failures) == 1
        assert metrics.total("fallbacks_total") == 0
        # not a byte travelled twice: the whole prompt came once, in two parts
        whole = metrics.total("kv_received_bytes_total")
        assert 0 < metrics.total("kv_transfer_bytes_sum") < whole
        assert whole == BLOCKS * BLOCK_BYTES


async def test_one_that_refuses_is_passed_over(tiny_model: Path) -> None:
    async with two_prefill_workers(
        tiny_model, kv_blocks=BLOCKS, max_waiting=1, prefix_caching=False
    ) as cluster:
        targets = [await target(worker) for worker in cluster.workers_of(Role.PREFILL)]
        (decode,) = cluster.workers_of(Role.DECODE)
        async with internal_channel(decode.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)

            def call(number: int, candidates: list[PrefillTarget]) -> Any:
                request = DecodeRequest(
                    request_id=str(number),
                    prompt_token_ids=prompt(1500, seed=f"refused {number}"),
                    output_token_ids=[],
                    sampling=SamplingParams(max_tokens=3, seed=1, ignore_eos=True),
                    prefill_candidates=candidates,
                )
                return stub.Decode(decode_request_to_proto(request), timeout=60)

            first = cluster.workers_of(Role.PREFILL)[0]
            fill = [call(0, targets[:1])]
            await scrape_until(
                first.metrics, lambda m: m.blocks()["in_use"] == BLOCKS, "a full cache"
            )
            fill.append(call(1, targets[:1]))
            await scrape_until(
                first.metrics, lambda m: m.total("waiting_requests") == 1, "a full queue"
            )
            asked, found = [], []
            async for message in call(2, targets):
                event = decode_event_from_proto(message)
                if isinstance(event, TokensEvent):
                    found += event.token_ids
                elif hasattr(event, "prefill_worker_id"):
                    asked.append(event.prefill_worker_id)
            assert asked == ["prefill-0", "prefill-1"]
            assert len(found) == 3
            metrics = await scrape(decode.metrics)
            assert metrics.total("kv_transfer_failures_total", reason="refused") == 1
            assert metrics.total("fallbacks_total") == 0
            for one in fill:
                one.cancel()
            await inject(first, "slow", 0.0)
