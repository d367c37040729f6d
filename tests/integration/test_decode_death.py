"""A decode engine that dies ends its streams at once, with a clear status, and nobody else's."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cli.cluster_spec import ClusterSpec
from cli.local_cluster import LocalCluster
from tasuki.client import Client, GenerateOutput
from tasuki.config import WorkerConfig
from tasuki.errors import UnavailableError
from tasuki.messages import Role
from tests.integration.scrape import assert_no_leaks
from tests.integration.streams import Answer, ask, prompt

pytestmark = [pytest.mark.dist, pytest.mark.asyncio(loop_scope="session")]

LONG = 1500


async def test_a_dead_decode_engine_ends_only_its_own_streams(tiny_model: Path) -> None:
    spec = ClusterSpec(model=tiny_model, decode=2, worker=WorkerConfig(engine_restarts=0))
    async with LocalCluster(spec) as cluster:
        await cluster.wait_ready()
        victim, other = cluster.workers_of(Role.DECODE)
        (prefill,) = cluster.workers_of(Role.PREFILL)
        async with Client(cluster.router_address) as client:
            streams = [
                client.generate(
                    prompt_token_ids=prompt(200, seed=n), max_tokens=LONG, ignore_eos=True
                )
                for n in range(4)
            ]
            for stream in streams:
                await anext(stream)
            cluster.kill(victim, signal.SIGCONT)  # on purpose: its end is no surprise
            os.kill(victim.engine_pid, signal.SIGKILL)
            died = time.monotonic()
            words: list[str] = []

            async def seconds_to_end(stream: AsyncIterator[GenerateOutput]) -> float | None:
                try:
                    async for _ in stream:
                        pass
                except UnavailableError as error:
                    words.append(error.message)
                    return time.monotonic() - died
                return None

            ends = await asyncio.gather(*map(seconds_to_end, streams))
            assert all("decode-0" in message for message in words)
            assert sorted(end is None for end in ends) == [False, False, True, True]
            assert min(end for end in ends if end is not None) < 1.0
            assert await cluster.wait_exit(victim) == 1
            again: list[Answer] = list(
                await asyncio.gather(*(ask(client, prompt(200, seed=n)) for n in range(3)))
            )
            assert {answer.placement.decode_worker_id for answer in again} == {other.worker_id}
        for worker in (prefill, other):
            await assert_no_leaks(worker.metrics)
