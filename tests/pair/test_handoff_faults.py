"""Both roles' cores in one process: whatever the transfer does, the tokens are the same."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tasuki.messages import (
    ErrorStatus,
    FinishReason,
    FirstTokenEvent,
    LinkSend,
    Posted,
    PrefillCallEnded,
    PrefillDoneEvent,
    TokenLogprob,
)
from tasuki.transfer.connectors.loopback_fault import PlannedFault, Verdict
from tests.integration.streams import prompt
from tests.pair.relay import InlinePair, inline_pair

PROMPT = prompt(300)
BLOCKS = 19
LOGPROB = TokenLogprob(token_id=299, logprob=-1.0, rank=3, top_token_ids=[], top_logprobs=[])


async def undisturbed(model: Path) -> list[int]:
    async with inline_pair(model) as pair:
        outcome = await pair.ask(PROMPT, split=False)
    assert len(set(outcome.token_ids)) >= 30
    return outcome.token_ids


async def settled(pair: InlinePair) -> None:
    await pair.until_idle()
    assert "decode kv_block_leaks_total" not in pair.metrics
    assert "prefill kv_block_leaks_total" not in pair.metrics


async def test_an_undisturbed_handoff_computes_nothing_here(tiny_model: Path) -> None:
    expected = await undisturbed(tiny_model)
    async with inline_pair(tiny_model) as pair:
        outcome = await pair.ask(PROMPT)
        assert outcome.token_ids == expected
        assert outcome.finished is not None
        assert outcome.finished.computed_prompt_tokens == 0
        assert outcome.finished.handoff.blocks == BLOCKS
        await settled(pair)


@pytest.mark.parametrize(
    ("verdict", "index", "reason"),
    [
        (Verdict.FLIP, 0, "digest"),
        (Verdict.FLIP, 7, "digest"),
        (Verdict.FLIP, BLOCKS - 1, "digest"),
        (Verdict.DROP, 0, "link_down"),  # the next one arrives in its place: out of order
        (Verdict.DROP, 7, "link_down"),
        (Verdict.DROP, BLOCKS - 1, "stalled"),  # nothing follows: only time tells
    ],
)
async def test_a_damaged_or_lost_segment_is_caught(
    tiny_model: Path, verdict: Verdict, reason: str, index: int
) -> None:
    """One block per segment: what came before the fault is kept, the rest computed here."""
    expected = await undisturbed(tiny_model)
    fault = PlannedFault({index: verdict})
    patience = 2.0 if reason == "stalled" else 20.0  # the decode worker's, which decides first
    prefill = {"handoff_timeout": 20.0}
    async with inline_pair(tiny_model, fault, prefill=prefill, handoff_timeout=patience) as pair:
        outcome = await pair.ask(PROMPT)
        assert outcome.token_ids == expected
        assert outcome.fallback == reason
        assert outcome.finished is not None
        assert outcome.finished.computed_prompt_tokens == len(PROMPT) - 16 * index
        assert pair.metrics[f"decode kv_transfer_failures_total {reason}"] == 1
        if reason == "stalled":  # the posted receive keeps its block until the link ends
            pair.cores["decode"].host.call_soon(pair.cores["decode"].close)
        await settled(pair)


class LateFirstToken(InlinePair):
    """What the prefill worker says on its call is held back until `let_go`; its link is not."""

    def __init__(self, model: Path) -> None:
        super().__init__(model, None, {}, handoff_timeout=20.0)
        self.held: list[tuple[int, Any]] = []

    def _stream_event(self, role: str, stream_id: int, event: Any) -> None:
        if role == "prefill":
            self.held.append((stream_id, event))
        else:
            super()._stream_event(role, stream_id, event)

    def let_go(self) -> None:
        for stream_id, event in self.held:
            super()._stream_event("prefill", stream_id, event)


async def test_a_link_that_goes_once_all_is_committed_is_not_missed(tiny_model: Path) -> None:
    """A prefill worker that drains closes its links; its last first token may come after that."""
    expected = await undisturbed(tiny_model)
    pair = LateFirstToken(tiny_model)
    await pair.start()
    try:
        call = asyncio.ensure_future(pair.ask(PROMPT))
        await pair.until(lambda: pair.held and isinstance(pair.held[-1][1], PrefillDoneEvent))
        pair.cores["prefill"].host.call_soon(pair.cores["prefill"].close)
        await pair.until(lambda: all(r.state != "open" for r in pair.reports["decode"].links))
        pair.let_go()
        outcome = await call
        assert (outcome.token_ids, outcome.fallback) == (expected, "")
        assert outcome.finished is not None
        assert outcome.finished.computed_prompt_tokens == 0
        await settled(pair)
    finally:
        await pair.close()


async def test_a_prefill_worker_that_refuses_is_replaced(tiny_model: Path) -> None:
    """Its cache could never hold this prompt; the decode worker's can."""
    expected = await undisturbed(tiny_model)
    async with inline_pair(tiny_model, prefill={"kv_blocks": 8}) as pair:
        outcome = await pair.ask(PROMPT)
        assert outcome.token_ids == expected
        assert outcome.fallback == "refused"
        assert outcome.finished is not None
        assert outcome.finished.computed_prompt_tokens == len(PROMPT)
        await settled(pair)


async def test_a_call_that_ends_amid_segments_is_made_anew_around_them(tiny_model: Path) -> None:
    """What arrived is kept; blocks that may still be written into are not given to the next try."""
    expected = await undisturbed(tiny_model)
    fault = PlannedFault({7: Verdict.HOLD})
    async with inline_pair(tiny_model, fault, handoff_timeout=20.0) as pair:
        block_bytes = pair.cores["decode"].engine.cache.layout.block_bytes
        posted: list[Posted] = []

        def is_lost(message: LinkSend | FirstTokenEvent) -> bool:
            if isinstance(message, LinkSend) and isinstance(message.message, Posted):
                posted.append(message.message)
            return isinstance(message, FirstTokenEvent)

        pair.is_lost = is_lost
        asked = asyncio.ensure_future(pair.ask(PROMPT, tries=2))
        await pair.until(
            lambda: (
                len(posted) == BLOCKS
                and pair.first_tokens
                and pair.metrics.get("decode kv_received_bytes_total") == 7 * block_bytes
            )
        )
        pair.is_lost = lambda message: False
        gone = ErrorStatus(code="UNAVAILABLE", reason="", message="the call was lost")
        for handoff_id in pair.handoff_ids:
            pair.decode.send(PrefillCallEnded(handoff_id=handoff_id, error=gone))
        await pair.until(
            lambda: (
                len(pair.handoff_ids) == 2
                and pair.metrics["decode kv_blocks quarantined"] == BLOCKS - 7
            )
        )
        fault.release(7)
        outcome = await asked
        assert (outcome.token_ids, outcome.fallback) == (expected, "")
        assert outcome.finished is not None
        assert outcome.finished.computed_prompt_tokens == 0
        assert outcome.finished.handoff.blocks == BLOCKS - 7
        assert pair.metrics["decode kv_transfer_failures_total prefill_died"] == 1
        await settled(pair)


NONSENSE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no such token": ({}, {"token_ids": [300_000]}),
    "no token": ({}, {"token_ids": []}),
    "two tokens": ({}, {"token_ids": [5, 6]}),
    "unasked logprobs": ({}, {"logprobs": [LOGPROB]}),
    "no logprobs": ({"logprobs": 2}, {"logprobs": []}),
    "those of another token": ({"logprobs": 2}, {"logprobs": [LOGPROB]}),
    "no logprobs of the prompt": ({"prompt_logprobs": 0}, {"prompt_logprobs": []}),
    "unasked logprobs of the prompt": ({}, {"prompt_logprobs": [LOGPROB] * 299}),
    "more cached than there is": ({}, {"cached_tokens": 301}),
}


@pytest.mark.parametrize(("asked", "said"), NONSENSE.values(), ids=NONSENSE)
async def test_first_tokens_that_cannot_be_are_not_taken(
    tiny_model: Path, asked: dict[str, Any], said: dict[str, Any]
) -> None:
    """They would end this engine, or reach a client."""
    async with inline_pair(tiny_model) as pair:
        expected = await pair.ask(PROMPT, split=False, **asked)
        pair.rewritten = lambda event: msgspec.structs.replace(event, **said)
        outcome = await pair.ask(PROMPT, **asked)
        assert outcome.fallback == "refused"
        assert outcome.token_ids == expected.token_ids
        assert outcome.logprobs == expected.logprobs
        assert outcome.prompt_logprobs == expected.prompt_logprobs
        await settled(pair)


async def test_a_planted_leak_is_counted(tiny_model: Path) -> None:
    async with inline_pair(tiny_model) as pair:
        await pair.ask(PROMPT)
        await pair.until_idle()
        engine = pair.cores["decode"].engine

        def leak() -> None:
            assert engine.blocks.pool.allocate(2) is not None

        pair.cores["decode"].host.call_soon(leak)
        await pair.until(lambda: pair.metrics.get("decode kv_block_leaks_total") == 2)


async def test_eos_as_first_token_needs_no_handoff(tiny_model: Path) -> None:
    expected = await undisturbed(tiny_model)
    async with inline_pair(tiny_model) as pair:
        for core in pair.cores.values():
            config = dataclasses.replace(
                core.engine.model.config, eos_token_ids=frozenset({expected[0]})
            )
            core.engine.model.config = config
        outcome = await pair.ask(PROMPT, ignore_eos=False)
        assert outcome.token_ids == expected[:1]
        assert outcome.finished is not None
        assert outcome.finished.finish_reason is FinishReason.STOP
        assert outcome.fallback == ""
        await settled(pair)
        assert not any("failures" in name for name in pair.metrics)


async def test_many_at_once_with_little_memory(tiny_model: Path) -> None:
    """Reservations wait, requests are preempted, and every answer is as if alone."""
    prompts = [prompt(100 + 9 * n, seed=n) for n in range(8)]
    async with inline_pair(tiny_model) as pair:
        alone = [(await pair.ask(p, split=False)).token_ids for p in prompts]
    async with inline_pair(tiny_model, kv_blocks=40, reserve_timeout=25.0) as pair:
        outcomes = await asyncio.gather(
            *(pair.ask(p, split=n % 3 > 0) for n, p in enumerate(prompts))
        )
        assert [outcome.token_ids for outcome in outcomes] == alone
        await settled(pair)


async def test_no_memory_in_time_is_an_error_before_any_token(tiny_model: Path) -> None:
    async with inline_pair(tiny_model, kv_blocks=24, reserve_timeout=0.2) as pair:
        first = asyncio.ensure_future(pair.ask(PROMPT))
        second = await pair.ask(PROMPT)
        outcomes = [await first, second]
        failed = [outcome for outcome in outcomes if outcome.failed is not None]
        for outcome in failed:
            assert outcome.token_ids == []
            assert outcome.failed is not None
            assert outcome.failed.error.reason == "no_kv"
        assert len(failed) <= 1
        await settled(pair)
