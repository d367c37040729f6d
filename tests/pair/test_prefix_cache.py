"""Prefix caches on both sides of a handoff: less is computed, less travels, the same tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tasuki.transfer.connectors.loopback_fault import PlannedFault, Verdict
from tests.integration.streams import prompt
from tests.pair.relay import InlinePair, inline_pair

PROMPT = prompt(300)
OTHER = PROMPT[:165] + prompt(135, seed=1)  # the first ten blocks and a bit are the same


@pytest.fixture
async def expected(tiny_model: Path) -> dict[str, list[int]]:
    """Without any cache."""
    async with inline_pair(tiny_model) as pair:
        return {
            "prompt": (await pair.ask(PROMPT, split=False)).token_ids,
            "other": (await pair.ask(OTHER, split=False)).token_ids,
        }


def reset(pair: InlinePair, role: str) -> None:
    core = pair.cores[role]

    def forget() -> None:
        core.engine.blocks.reset_prefix_cache()

    core.host.call_soon(forget)


async def test_only_what_the_decode_worker_lacks_travels(
    tiny_model: Path, expected: dict[str, list[int]]
) -> None:
    async with inline_pair(tiny_model, prefix_caching=True) as pair:
        first = await pair.ask(PROMPT)
        second = await pair.ask(OTHER)
        assert (first.token_ids, second.token_ids) == (expected["prompt"], expected["other"])
        assert first.finished is not None
        assert second.finished is not None
        assert (first.finished.handoff.blocks, first.finished.cached_tokens) == (19, 0)
        assert (second.finished.handoff.blocks, second.finished.cached_tokens) == (9, 160)
        assert second.finished.computed_prompt_tokens == 0
        for name in ("decode prefix_cache_hits_total", "prefill prefill_tokens_total cached"):
            await pair.until(lambda name=name: pair.metrics.get(name) == 160)
        await pair.until_idle()


async def test_a_prompt_that_is_cached_but_for_its_end_is_computed_here(
    tiny_model: Path, expected: dict[str, list[int]]
) -> None:
    async with inline_pair(tiny_model, prefix_caching=True) as pair:
        await pair.ask(PROMPT)
        again = await pair.ask(PROMPT)
        assert again.token_ids == expected["prompt"]
        assert again.local == "prefix_cached"
        assert again.finished is not None
        assert again.finished.cached_tokens == 288
        assert again.finished.computed_prompt_tokens == 12
        await pair.until_idle()


async def test_the_prefill_worker_sends_what_it_had_cached(
    tiny_model: Path, expected: dict[str, list[int]]
) -> None:
    """The decode worker has forgotten: the whole prompt travels, and next to none is computed."""
    async with inline_pair(tiny_model, prefix_caching=True) as pair:
        await pair.ask(PROMPT)
        reset(pair, "decode")
        again = await pair.ask(PROMPT)
        assert again.token_ids == expected["prompt"]
        assert again.finished is not None
        assert (again.finished.handoff.blocks, again.finished.cached_tokens) == (19, 288)
        await pair.until_idle()


async def test_a_damaged_transfer_keeps_what_was_cached_here(
    tiny_model: Path, expected: dict[str, list[int]]
) -> None:
    fault = PlannedFault({19 + 3: Verdict.FLIP})  # the fourth block of the second handoff
    async with inline_pair(tiny_model, fault, prefix_caching=True) as pair:
        await pair.ask(PROMPT)
        other = await pair.ask(OTHER)
        assert other.token_ids == expected["other"]
        assert other.fallback == "digest"
        assert other.finished is not None
        assert other.finished.computed_prompt_tokens == 300 - 160 - 3 * 16
        await pair.until_idle()


async def test_salts_share_nothing(tiny_model: Path, expected: dict[str, list[int]]) -> None:
    async with inline_pair(tiny_model, prefix_caching=True) as pair:
        for salt in ("a", "b"):
            answer = await pair.ask(PROMPT, cache_salt=salt)
            assert answer.token_ids == expected["prompt"]
            assert answer.finished is not None
            assert (answer.finished.handoff.blocks, answer.finished.cached_tokens) == (19, 0)
        await pair.until_idle()


async def test_cached_prompts_under_little_memory(tiny_model: Path) -> None:
    """Hits, evictions, reservations and preemption at once; every answer is as if alone."""
    prompts = [PROMPT[: 40 + 16 * n] + prompt(30 + n, seed=n) for n in range(8)]
    async with inline_pair(tiny_model) as pair:
        alone = [(await pair.ask(p, split=False)).token_ids for p in prompts]
    async with inline_pair(
        tiny_model, kv_blocks=40, reserve_timeout=25.0, prefix_caching=True
    ) as pair:
        for _ in range(2):
            outcomes = await asyncio.gather(
                *(pair.ask(p, split=n % 3 > 0) for n, p in enumerate(prompts))
            )
            assert [outcome.token_ids for outcome in outcomes] == alone
        await pair.until_idle()
