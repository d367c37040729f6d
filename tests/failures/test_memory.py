"""Too little memory: bounded waits, errors before any token, and the same tokens in the end."""

from __future__ import annotations

import grpc
import pytest

from tasuki.messages import PrefillTarget
from tests.failures.struck import PROMPT, Struck
from tests.integration.scrape import scrape
from tests.integration.streams import prompt

pytestmark = [pytest.mark.dist, pytest.mark.asyncio(loop_scope="session")]


async def test_no_blocks_for_a_reservation(struck: Struck) -> None:
    """The worker says so before any token; the router asks again when there is room."""
    before = await scrape(struck.cluster.router.metrics)
    _, epoch = await struck.target(struck.prefill)
    target = PrefillTarget(
        worker_id=struck.prefill.worker_id, worker_epoch=epoch, address=struck.prefill.address
    )
    async with struck.held("reserved", "no blocks for a reservation") as asked:
        with pytest.raises(grpc.aio.AioRpcError, match="KV blocks") as refused:
            await struck.ask_decode_worker(PROMPT, [target])
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not asked.tokens
        answer = await asked.answer()
    assert answer.token_ids == await struck.expected()
    assert (answer.placement.kind, answer.placement.fallback_reason) == ("split", "")
    assert answer.stall > 1.0  # --reserve-timeout
    after = await scrape(struck.cluster.router.metrics)
    assert after.total("rejections_total") == before.total("rejections_total")


async def test_growth_forces_preemption_while_handoffs_arrive(struck: Struck) -> None:
    prompts = [prompt(100 + 90 * n, seed=f"growth {n}") for n in range(6)]
    expected = [await struck.expected(ids, max_tokens=400) for ids in prompts]
    before = await scrape(struck.decode.metrics)
    asked = [
        struck.ask(f"growth and handoffs {n}", ids, max_tokens=400) for n, ids in enumerate(prompts)
    ]
    answers = [await one.answer() for one in asked]
    assert [answer.token_ids for answer in answers] == expected
    assert {answer.placement.fallback_reason for answer in answers} == {""}
    assert sum(answer.placement.kind == "split" for answer in answers) >= 3
    after = await scrape(struck.decode.metrics)
    assert after.total("preemptions_total") > before.total("preemptions_total")
