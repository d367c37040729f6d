"""With both caches full, neither side waits for the other: everything ends, by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

from decode.core import DecodeCore
from tests.integration.streams import prompt
from tests.pair.relay import inline_pair

PROMPTS = [prompt(100 + 16 * (n % 5), seed=f"full {n}") for n in range(16)]
TOKENS = 40


async def test_both_sides_full_and_nobody_waits_for_the_other(tiny_model: Path) -> None:
    async with inline_pair(tiny_model) as pair:
        expected = [await pair.ask(ids, max_tokens=TOKENS, split=False) for ids in PROMPTS[:3]]
    # one prompt fills the prefill side, and the decode side holds three or four
    async with inline_pair(
        tiny_model, prefill={"kv_blocks": 14, "max_num_batched_tokens": 8}, kv_blocks=36,
        reserve_timeout=60.0, handoff_timeout=60.0,
    ) as pair:  # fmt: skip
        asked = [asyncio.ensure_future(pair.ask(ids, max_tokens=TOKENS)) for ids in PROMPTS]
        decode, prefill = pair.cores["decode"], pair.cores["prefill"]
        assert isinstance(decode, DecodeCore)
        seen = {"reservations": 0, "prompts": 0}  # most that waited for blocks at any one time

        def both_had_a_queue() -> bool:
            seen["reservations"] = max(seen["reservations"], decode.handoffs.num_waiting)
            seen["prompts"] = max(seen["prompts"], len(prefill.engine.scheduler.waiting))
            return min(seen.values()) > 0

        await pair.until(both_had_a_queue)
        async with asyncio.timeout(60):
            outcomes = await asyncio.gather(*asked)
        assert all(outcome.failed is None for outcome in outcomes)
        assert all(len(outcome.token_ids) == TOKENS for outcome in outcomes)
        assert [o.token_ids for o in outcomes[:3]] == [o.token_ids for o in expected]
        assert sum(not outcome.local and not outcome.fallback for outcome in outcomes) >= 8
        await pair.until_idle()
        for role in ("decode", "prefill"):
            assert f"{role} kv_block_leaks_total" not in pair.metrics
