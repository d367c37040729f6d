"""A client that disappears stops the work on both workers within a second."""

from __future__ import annotations

import asyncio
import time

import pytest

from cli.local_cluster import LocalCluster
from tasuki.client import Client
from tasuki.errors import TasukiError
from tasuki.messages import Role
from tests.integration.scrape import assert_no_leaks, scrape_until
from tests.integration.streams import ask, keep_prefilling, prompt

pytestmark = [pytest.mark.dist, pytest.mark.asyncio(loop_scope="session")]

STOP_SECONDS = 1.0


async def gone_within_a_second(cluster: LocalCluster, since: float) -> None:
    for worker in cluster.workers:
        await assert_no_leaks(worker.metrics)
    assert time.monotonic() - since < STOP_SECONDS


async def test_a_client_that_leaves_while_tokens_stream(split: LocalCluster) -> None:
    async with Client(split.router_address) as client:
        stream = client.generate(prompt_token_ids=prompt(200), max_tokens=1500, ignore_eos=True)
        async for output in stream:
            if output.index > 3:
                break
        await stream.aclose()
        await gone_within_a_second(split, time.monotonic())


async def test_a_client_that_leaves_while_its_prompt_is_computed(split: LocalCluster) -> None:
    (prefill,) = split.workers_of(Role.PREFILL)
    client = Client(split.router_address)
    calls = [  # enough of them that one is being computed whenever the worker reports
        asyncio.ensure_future(keep_prefilling(client, f"cancel {number}", asyncio.Event()))
        for number in range(12)
    ]
    await scrape_until(
        prefill.metrics, lambda m: m.total("running_requests") >= 1, "a running prompt"
    )
    await client.close()  # as abrupt as it gets short of a killed process
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert any(isinstance(end, TasukiError | asyncio.CancelledError) for end in ends)
    await gone_within_a_second(split, time.monotonic())


async def test_others_are_undisturbed_by_a_cancel(
    split: LocalCluster, colocated: LocalCluster
) -> None:
    async with Client(colocated.router_address) as client:
        expected = await ask(client, prompt(300))
    async with Client(split.router_address) as client:
        streams = [
            client.generate(prompt_token_ids=prompt(300, seed=n), max_tokens=500, ignore_eos=True)
            for n in range(1, 5)
        ]
        firsts = [await anext(stream) for stream in streams]
        kept = asyncio.ensure_future(ask(client, prompt(300)))
        for stream in streams:
            await stream.aclose()
        assert (await kept).token_ids == expected.token_ids
        assert all(first.index == 0 for first in firsts)
