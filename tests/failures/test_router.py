"""A router that dies: the client goes on with the same request once it is back."""

from __future__ import annotations

import pytest

from tests.failures.struck import STREAM, Struck
from tests.integration.faults import CRAWL

pytestmark = [pytest.mark.dist, pytest.mark.asyncio(loop_scope="session")]

# without a seed: the noise is drawn from the request's id, so that another id would show
UNSEEDED = {"temperature": 1.0, "request_id": "killed with its router"}


async def test_killed_while_prompts_are_handed_over_and_tokens_stream(struck: Struck) -> None:
    expected = await struck.expected(STREAM, max_tokens=1000, **UNSEEDED)
    streaming = struck.ask("router killed mid-stream", STREAM, max_tokens=1000, **UNSEEDED)
    await streaming.has_tokens(4)
    async with struck.slowed(CRAWL):
        waiting = struck.ask("router killed before the first token")
        await struck.until_handoff("transferring")
        await struck.restart(struck.cluster.router)
    answers = [await streaming.answer(), await waiting.answer()]
    assert [answer.token_ids for answer in answers] == [expected, await struck.expected()]
