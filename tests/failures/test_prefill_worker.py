"""A prefill worker that dies, stops or starts anew costs the client only time."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tasuki.messages import Commit, FirstTokenEvent, LinkEnded, LinkSend
from tests.failures.struck import DEATH_SECONDS, LOOK_SECONDS, NEXT, PEER_TIMEOUT, PROMPT, Struck
from tests.integration.scrape import scrape
from tests.integration.streams import DEATHS, ask
from tests.pair.relay import inline_pair

TRIES = 5
FAILURES = "kv_transfer_failures_total"

pytestmark = [pytest.mark.dist, pytest.mark.asyncio(loop_scope="session")]


async def test_killed_before_compute(struck: Struck) -> None:
    before = (await scrape(struck.decode.metrics)).total(FAILURES)
    async with struck.held("dispatched", "prefill worker killed before compute") as asked:
        await struck.signal_engine(struck.prefill, signal.SIGKILL)
        await struck.noticed(struck.decode, FAILURES, before, DEATH_SECONDS)
        answer = await asked.answer()
    assert answer.token_ids == await struck.expected()
    assert answer.placement.fallback_reason in DEATHS
    assert answer.placement.decode_computed_prompt_tokens == len(PROMPT)


async def test_killed_mid_compute(struck: Struck) -> None:
    """A busy core may let it finish before the blow falls: then another one is struck."""
    for _ in range(TRIES):
        before = await scrape(struck.decode.metrics)
        engine, _ = await struck.target(struck.prefill)
        asked = struck.ask("prefill worker killed mid-compute")
        await struck.until_more_kv(before)
        os.kill(engine, signal.SIGKILL)
        answer = await asked.answer()
        assert answer.token_ids == await struck.expected()
        if answer.placement.fallback_reason:
            break
        await struck.mended()
    assert answer.placement.fallback_reason in DEATHS
    assert 0 < answer.placement.decode_computed_prompt_tokens < len(PROMPT)


async def test_killed_mid_transfer(struck: Struck) -> None:
    """Server and engine, when all is computed and half of it has travelled."""
    async with struck.held("transferring", "prefill worker killed mid-transfer") as asked:
        await asked.has_tokens()
        struck.cluster.kill(struck.prefill)  # its engine ends with it
        answer = await asked.answer()
    await struck.restart(struck.prefill)
    assert answer.token_ids == await struck.expected()
    assert answer.placement.fallback_reason in DEATHS
    assert 0 < answer.placement.decode_computed_prompt_tokens < len(PROMPT)


@pytest.mark.asyncio
@pytest.mark.parametrize("first_token", ["known", "lost"])
async def test_killed_after_the_last_byte_but_before_commit(
    tiny_model: Path, first_token: str
) -> None:
    """Its last message is held back until every block has arrived; it is never sent."""
    prompt_ids = PROMPT[:300]
    async with inline_pair(tiny_model) as pair:
        expected = await pair.ask(prompt_ids, split=False)
        block_bytes = pair.cores["decode"].engine.cache.layout.block_bytes
        links: list[str] = []  # whose Commit was on its way

        def is_lost(message: LinkSend | FirstTokenEvent) -> bool:
            if isinstance(message, FirstTokenEvent):
                return first_token == "lost"
            if isinstance(message.message, Commit):
                links.append(message.link_id)
            return isinstance(message.message, Commit)

        pair.is_lost = is_lost
        asked = asyncio.ensure_future(pair.ask(prompt_ids))
        received = "decode kv_received_bytes_total"
        await pair.until(lambda: links and pair.metrics.get(received) == 19 * block_bytes)
        for engine in (pair.prefill, pair.decode):
            engine.send(LinkEnded(link_id=links[0], error=None))
        pair.is_lost = lambda message: False
        answer = await asked
        assert answer.token_ids == expected.token_ids
        assert answer.fallback in DEATHS
        assert answer.finished is not None
        assert answer.finished.computed_prompt_tokens == (first_token == "lost")
        again = answer
        while again.fallback or again.local:  # until the link is open again
            again = await pair.ask(prompt_ids)
            assert again.token_ids == expected.token_ids
            assert again.local in ("", "link_down")
            assert again.fallback == ""
        await pair.until_idle()
        for role in ("decode", "prefill"):
            assert f"{role} kv_block_leaks_total" not in pair.metrics


async def test_stopped_and_resumed_in_time(struck: Struck) -> None:
    """Nobody gives anything up."""
    async with struck.stopped(struck.prefill):
        asked = struck.ask("prefill worker stopped for a moment")
        await struck.until_handoff("dispatched")
    answer = await asked.answer()
    assert answer.token_ids == await struck.expected()
    assert (answer.placement.kind, answer.placement.fallback_reason) == ("split", "")


async def test_stopped_for_long_and_resumed(struck: Struck) -> None:
    before = (await scrape(struck.decode.metrics)).total(FAILURES)
    async with (
        struck.held("transferring", "prefill worker stopped") as asked,
        struck.stopped(struck.prefill),
    ):
        await struck.noticed(struck.decode, FAILURES, before, PEER_TIMEOUT + LOOK_SECONDS)
        answer = await asked.answer()
    assert answer.token_ids == await struck.expected()
    assert answer.placement.fallback_reason == "stalled"
    assert 0 < answer.placement.decode_computed_prompt_tokens < len(PROMPT)


async def test_restarted_on_the_same_address(struck: Struck) -> None:
    """Killed when it had handed over: that stream goes on, and the next one is local until it is
    there again.
    """
    expected = await struck.expected(max_tokens=540)
    async with struck.held(
        "committed", "prefill worker killed after the handoff", max_tokens=540
    ) as asked:
        struck.cluster.kill(struck.prefill)
        assert await struck.cluster.wait_exit(struck.prefill) == -signal.SIGKILL
        alone = await ask(struck.client, NEXT)
        answer = await asked.answer()
        await struck.restart(struck.prefill)
    assert answer.token_ids == expected
    assert (answer.placement.kind, answer.placement.fallback_reason) == ("split", "")
    assert alone.token_ids == await struck.expected(NEXT)
    assert alone.placement.kind == "local"
