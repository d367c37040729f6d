"""A client that cancels, is late, or disappears: in whatever state its request is, the work on all
workers stops within a second, and every block comes home.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tasuki.client import Client
from tasuki.errors import DeadlineError, TasukiError
from tasuki.messages import FinishReason
from tests.failures.struck import PROMPT, SECONDS, STATES, STREAM, Struck
from tests.integration.faults import CRAWL
from tests.integration.streams import NUM_TOKENS, keep_prefilling, prompt

pytestmark = [pytest.mark.dist, pytest.mark.asyncio(loop_scope="session")]

ROOT = Path(__file__).resolve().parents[2]
STOP_SECONDS = 1.0
DEADLINE = 0.7  # seconds; every state is reached sooner, and would last longer


def options(state: str) -> dict[str, Any]:
    """Of a request that would stay in this state for longer than its deadline."""
    if state in ("committed", "abandoned"):
        return {"token_ids": STREAM, "max_tokens": 1800}
    return {"token_ids": PROMPT, "max_tokens": NUM_TOKENS}


@pytest.mark.parametrize("state", STATES)
async def test_cancels(struck: Struck, state: str) -> None:
    async with struck.held(state, "client that cancels", **options(state)) as asked:
        since = time.monotonic()
        await asked.cancel()
        await struck.until_gone(state)
    assert await struck.all_home() - since < STOP_SECONDS


@pytest.mark.parametrize("state", STATES)
async def test_deadline_passes(struck: Struck, state: str) -> None:
    what = "client with a deadline"
    async with struck.held(state, what, timeout=DEADLINE, **options(state)) as asked:
        try:
            answer = await asked.answer()
        except DeadlineError:
            pass
        else:
            assert answer.finish_reason is FinishReason.DEADLINE
        since = time.monotonic()
        await struck.until_gone(state)
    assert await struck.all_home() - since < STOP_SECONDS


@pytest.mark.parametrize("state", ["transferring", "committed"])
async def test_disappears(struck: Struck, state: str) -> None:
    """Its process is killed: nobody says goodbye."""
    async with lone_client(struck) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        async with contextlib.AsyncExitStack() as stack:
            if state == "transferring":
                await stack.enter_async_context(struck.slowed(CRAWL))
            client.stdin.write(json.dumps(options(state)).encode() + b"\n")
            async with asyncio.timeout(SECONDS):
                while int(await client.stdout.readline()) < (4 if state == "committed" else -1):
                    pass
            await struck.until_handoff(state)
            since = time.monotonic()
            client.kill()
            await struck.until_gone(state)
        assert await struck.all_home() - since < STOP_SECONDS


@contextlib.asynccontextmanager
async def lone_client(struck: Struck) -> AsyncIterator[asyncio.subprocess.Process]:
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.failures.lone_client", struck.cluster.router_address,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    try:
        yield client
    finally:
        with contextlib.suppress(ProcessLookupError):
            client.kill()
        await client.wait()


async def test_others_are_undisturbed_by_a_cancel(struck: Struck) -> None:
    expected = await struck.expected(STREAM)
    others = [struck.ask("", prompt(300, seed=f"cancelled {n}"), max_tokens=500) for n in range(4)]
    for one in others:
        await one.has_tokens()
    kept = struck.ask("beside clients that cancel", STREAM)
    for one in others:
        await one.cancel()
    assert (await kept.answer()).token_ids == expected


async def test_closes_its_connection_while_prompts_are_computed(struck: Struck) -> None:
    """As abrupt as it gets short of a killed process."""
    client = Client(struck.cluster.router_address)
    calls = [  # enough of them that one is being computed whenever the worker reports
        asyncio.ensure_future(keep_prefilling(client, f"cancel {number}", asyncio.Event()))
        for number in range(12)
    ]
    await struck.until(
        struck.prefill, lambda m: m.total("running_requests") >= 1, "a running prompt"
    )
    since = time.monotonic()
    await client.close()
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert any(isinstance(end, TasukiError | asyncio.CancelledError) for end in ends)
    assert await struck.all_home() - since < STOP_SECONDS
