"""split == colocated == fallback, with real processes, and proof that the KV really travelled."""

from __future__ import annotations

import asyncio

import pytest

from cli.cluster.local_cluster import LocalCluster
from tasuki.client import Client
from tasuki.messages import Role
from tests.integration.scrape import scrape, scrape_until
from tests.integration.streams import NUM_TOKENS, Answer, ask, prompt

pytestmark = [pytest.mark.dist, pytest.mark.asyncio(loop_scope="session")]

LENGTHS = (64, 65, 80, 100, 300, 700)
SAMPLINGS = ((0.0, None), (0.8, 7))


async def answers(cluster: LocalCluster, *, together: bool) -> list[Answer]:
    """Every length with every sampling, one after another or all at once."""
    async with Client(cluster.router_address) as client:
        calls = [
            ask(client, prompt(length), temperature=temperature, seed=seed)
            for length in LENGTHS
            for temperature, seed in SAMPLINGS
        ]
        if together:
            return list(await asyncio.gather(*calls))
        return [await call for call in calls]


async def test_split_equals_colocated_alone_and_batched(
    split: LocalCluster, colocated: LocalCluster
) -> None:
    expected = await answers(colocated, together=False)
    assert all(answer.placement.kind == "local" for answer in expected)
    for cluster in (split, colocated):
        for together in (False, True):
            got = await answers(cluster, together=together)
            assert [a.token_ids for a in got] == [a.token_ids for a in expected]
            assert [a.text for a in got] == [a.text for a in expected]
            if cluster is split and not together:
                places = {
                    (a.placement.kind, a.placement.reason, a.placement.fallback_reason) for a in got
                }
                assert {kind for kind, *_ in places} == {"split"}, places
    for answer in expected:  # streams in which a wrong block would show
        assert len(answer.token_ids) == NUM_TOKENS
        assert len(set(answer.token_ids)) >= 30


async def test_the_kv_really_travelled(split: LocalCluster) -> None:
    (decode,) = split.workers_of(Role.DECODE)
    (prefill,) = split.workers_of(Role.PREFILL)
    async with Client(decode.address) as direct:
        block_bytes = int((await direct.server_info()).facts["block_bytes"])
    received = (await scrape(decode.metrics)).total("kv_received_bytes_total")
    sent = (await scrape(prefill.metrics)).total("kv_sent_bytes_total")
    async with Client(split.router_address) as client:
        answer = await ask(client, prompt(300, seed=5))
    blocks = -(-300 // 16)
    assert answer.placement.decode_computed_prompt_tokens == 0
    assert answer.timings.transfer_blocks == blocks
    assert answer.timings.transfer_bytes == blocks * block_bytes

    async def moved(address: str, name: str, before: float) -> None:
        wanted = before + blocks * block_bytes
        await scrape_until(address, lambda m: m.total(name) == wanted, f"{name} {wanted}")

    await moved(decode.metrics, "kv_received_bytes_total", received)
    await moved(prefill.metrics, "kv_sent_bytes_total", sent)


async def test_short_prompts_stay_local(split: LocalCluster) -> None:
    async with Client(split.router_address) as client:
        for length in (1, 15, 16, 17, 63):
            answer = await ask(client, prompt(length), max_tokens=2)
            assert answer.placement.kind == "local"
            assert answer.placement.reason == "short_prompt"


async def test_one_token_needs_no_transfer(split: LocalCluster, colocated: LocalCluster) -> None:
    async with Client(split.router_address) as client:
        one = await ask(client, prompt(100), max_tokens=1)
    async with Client(colocated.router_address) as client:
        other = await ask(client, prompt(100), max_tokens=1)
    assert one.token_ids == other.token_ids
    assert one.placement.kind == "split"
    assert one.placement.fallback_reason == ""
    assert one.timings.transfer_bytes == 0
