"""A decode worker that dies, stops or starts anew: every stream goes on, token for token. There is
only one here, so each request waits for it; tests/integration/test_decode_death.py has two.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from tests.failures.struck import DEATH_SECONDS, LONG, LOOK_SECONDS, REPORT_TIMEOUT, STREAM, Struck
from tests.integration.scrape import scrape
from tests.integration.streams import ask_samples, prompt

pytestmark = [pytest.mark.dist, pytest.mark.asyncio(loop_scope="session")]

MIGRATIONS = "migrations_total"
SAMPLED = {"temperature": 0.9, "presence_penalty": 0.5, "seed": 11, "logprobs": 2}


async def migrations(struck: Struck, reason: str) -> float:
    metrics = await scrape(struck.cluster.router.metrics)
    return metrics.total(MIGRATIONS, reason=reason)


async def killed(struck: Struck, state: str, what: str) -> None:
    """Its engine dies while a request is in that state."""
    expected = await struck.expected()
    before = await migrations(struck, "decode_died")
    restarts = (await scrape(struck.decode.metrics)).total("engine_restarts_total")
    async with struck.held(state, what) as asked:
        assert asked.tokens == expected[: len(asked.tokens)]
        await struck.signal_engine(struck.decode, signal.SIGKILL)
        router = struck.cluster.router
        await struck.noticed(router, MIGRATIONS, before, DEATH_SECONDS, reason="decode_died")
        answer = await asked.answer()
    assert answer.token_ids == expected
    after = await scrape(struck.decode.metrics)
    assert after.total("engine_restarts_total") == restarts + 1


async def test_killed_while_reserving(struck: Struck) -> None:
    await killed(struck, "reserved", "decode worker killed while reserving")


async def test_killed_while_receiving(struck: Struck) -> None:
    await killed(struck, "transferring", "decode worker killed while receiving")


async def test_killed_mid_decode(struck: Struck) -> None:
    """Greedy, sampled, and several samples of one prompt, each of which goes on by itself."""
    prompts = [STREAM, *(prompt(200, seed=f"mid-decode {n}") for n in range(2))]
    several: dict[str, Any] = {"n": 4, "temperature": 1.1, "seed": 5, "max_tokens": 300}
    expected = [
        await struck.expected(prompts[0], max_tokens=LONG),
        await struck.expected(prompts[1], max_tokens=LONG, **SAMPLED),
    ]
    wanted = await ask_samples(struck.client, prompts[2], **several)
    before = await migrations(struck, "decode_died")
    asked = [
        struck.ask("decode worker killed mid-decode", prompts[0], max_tokens=LONG),
        struck.ask("the same, sampled", prompts[1], max_tokens=LONG, **SAMPLED),
    ]
    for one in asked:
        await one.has_tokens(4)
    samples = asyncio.ensure_future(ask_samples(struck.client, prompts[2], **several))
    await struck.until(
        struck.decode, lambda m: m.total("handoffs", state="committed") == 3, "three that decode"
    )
    await struck.signal_engine(struck.decode, signal.SIGKILL)
    answers = [await one.answer() for one in asked]
    assert [answer.token_ids for answer in answers] == expected
    assert all(len(one.logprobs) == LONG for one in answers[1:])
    assert await samples == wanted
    assert await migrations(struck, "decode_died") >= before + 3


async def test_stopped_and_resumed_in_time(struck: Struck) -> None:
    """The stream pauses; nobody gives it up."""
    before = await migrations(struck, "stalled")
    expected = await struck.expected(STREAM, max_tokens=LONG)
    asked = struck.ask("decode worker stopped for a moment", STREAM, max_tokens=LONG)
    await asked.has_tokens(4)
    async with struck.stopped(struck.decode):
        seen = len(asked.tokens)
    answer = await asked.answer()
    assert len(answer.token_ids) > seen
    assert answer.token_ids == expected
    assert await migrations(struck, "stalled") == before


async def test_stopped_for_long_and_resumed(struck: Struck) -> None:
    """It is taken for lost, and goes on with the same request when it is heard of again."""
    before = await migrations(struck, "stalled")
    expected = await struck.expected(STREAM, max_tokens=LONG)
    asked = struck.ask("decode worker stopped", STREAM, max_tokens=LONG)
    await asked.has_tokens(4)
    async with struck.stopped(struck.decode):
        router, within = struck.cluster.router, REPORT_TIMEOUT + LOOK_SECONDS
        await struck.noticed(router, MIGRATIONS, before, within, reason="stalled")
    answer = await asked.answer()
    assert answer.token_ids == expected


async def test_restarted_on_the_same_address(struck: Struck) -> None:
    expected = await struck.expected(STREAM, max_tokens=LONG)
    asked = struck.ask("decode worker restarted", STREAM, max_tokens=LONG)
    await asked.has_tokens(4)
    await struck.restart(struck.decode)
    answer = await asked.answer()
    assert answer.token_ids == expected
