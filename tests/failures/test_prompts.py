"""Prompts at a limit: nothing to hand over, next to nothing, or exactly whole blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki.convert.byte_tokenizer import EOS_ID
from tasuki.messages import FinishReason
from tests.failures.struck import PROMPT, Struck
from tests.integration.scrape import scrape
from tests.pair.relay import inline_pair

pytestmark = [pytest.mark.dist, pytest.mark.asyncio(loop_scope="session")]


async def test_eos_as_first_token(struck: Struck) -> None:
    """No handoff at all, and neither a failure nor a fallback."""
    before = await scrape(struck.decode.metrics)
    answer = await struck.ask(
        "EOS as first token", logit_bias={EOS_ID: 100.0}, ignore_eos=False
    ).answer()
    assert answer.token_ids == [EOS_ID]
    assert answer.finish_reason is FinishReason.STOP
    assert (answer.placement.kind, answer.placement.fallback_reason) == ("split", "")
    assert answer.timings.transfer_bytes == 0
    after = await scrape(struck.decode.metrics)
    for name in ("kv_transfer_failures_total", "fallbacks_total", "kv_transfer_bytes_count"):
        assert after.total(name) == before.total(name)


@pytest.mark.parametrize(("length", "blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (320, 20)])
async def test_one_token_and_whole_blocks(struck: Struck, length: int, blocks: int) -> None:
    """Computed there and handed over, against an engine that computes all of it alone."""
    alone, _ = await struck.ask_decode_worker(PROMPT[:length])
    answer = await struck.ask(f"prompt of {length} tokens", PROMPT[:length]).answer()
    assert answer.token_ids == alone
    assert (answer.placement.kind, answer.placement.fallback_reason) == ("split", "")
    assert answer.placement.decode_computed_prompt_tokens == 0
    assert answer.timings.transfer_blocks == blocks


@pytest.mark.asyncio
async def test_all_of_it_in_the_decode_workers_prefix_cache(tiny_model: Path) -> None:
    whole = PROMPT[:160]
    async with inline_pair(tiny_model, prefix_caching=True) as pair:
        expected = await pair.ask(whole, split=False, cache_salt="alone")
        first = await pair.ask(whole)
        again = await pair.ask(whole)
        assert first.token_ids == again.token_ids == expected.token_ids
        assert again.local == "prefix_cached"
        assert again.finished is not None
        assert again.finished.computed_prompt_tokens == 1
        further = await pair.ask(PROMPT)
        assert (further.local, further.fallback) == ("", "")
        await pair.until_idle()
        for role in ("decode", "prefill"):
            assert f"{role} kv_block_leaks_total" not in pair.metrics
