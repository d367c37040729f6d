"""`n` samples across a handoff: one prompt, one transfer, n first tokens, and the same answers as
computed on one worker.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tasuki.messages import CancelStream, FinishReason
from tasuki.transfer.connectors.loopback_fault import PlannedFault, Verdict
from tests.integration.streams import prompt
from tests.pair.relay import InlinePair, Outcome, inline_pair

PROMPT = prompt(300)
SAMPLED: dict[str, Any] = {"n": 4, "temperature": 1.0, "seed": 3, "max_tokens": 24, "logprobs": 1}


def said(outcomes: list[Outcome]) -> list[Any]:
    return [
        (
            one.token_ids,
            one.logprobs,
            one.prompt_logprobs,
            one.finished and one.finished.finish_reason,
        )
        for one in outcomes
    ]


async def check_same(pair: InlinePair, reason: str, **changes: Any) -> list[Outcome]:
    asked = SAMPLED | changes
    local = await pair.ask_samples(PROMPT, split=False, **asked)
    outcomes = await pair.ask_samples(PROMPT, **asked)
    assert said(outcomes) == said(local)
    assert outcomes[0].fallback == reason
    await pair.until_idle()
    return outcomes


FAULTS = [({}, ""), ({0: Verdict.FLIP}, "digest"), ({7: Verdict.FLIP}, "digest"),
          ({18: Verdict.FLIP}, "digest"), ({7: Verdict.DROP}, "link_down")]  # fmt: skip


@pytest.mark.parametrize(("fault", "reason"), FAULTS, ids=str)
async def test_split_and_fallback_are_as_local(
    tiny_model: Path, fault: dict[int, Verdict], reason: str
) -> None:
    async with inline_pair(tiny_model, PlannedFault(fault)) as pair:
        outcomes = await check_same(pair, reason)
        assert len({str(one.token_ids) for one in outcomes}) == 4
        if not reason:
            (told,) = pair.first_tokens
            assert told.token_ids == [one.token_ids[0] for one in outcomes]
            ends = [one.finished for one in outcomes if one.finished is not None]
            assert [end.computed_prompt_tokens for end in ends] == [0] * 4
            assert [end.handoff.blocks for end in ends] == [19] * 4  # one transfer, of the prompt


@pytest.mark.parametrize(("fault", "reason"), FAULTS, ids=str)
@pytest.mark.parametrize("ends", [[0], [1], [0, 2], [0, 1, 2]], ids=str)
async def test_samples_that_end_with_their_first_token(
    tiny_model: Path, fault: dict[int, Verdict], reason: str, ends: list[int]
) -> None:
    async with inline_pair(tiny_model) as pair:
        whole = await pair.ask_samples(PROMPT, split=False, **SAMPLED)
    firsts = [one.token_ids[0] for one in whole]
    stops = [firsts[index] for index in ends]
    async with inline_pair(tiny_model, PlannedFault(fault)) as pair:
        outcomes = await check_same(pair, reason, stop_token_ids=stops)
        for index, outcome in enumerate(outcomes):
            assert outcome.finished is not None
            assert (len(outcome.token_ids) == 1) == (firsts[index] in stops)


async def test_when_all_end_at_once_nothing_travels(tiny_model: Path) -> None:
    async with inline_pair(tiny_model) as pair:
        whole = await pair.ask_samples(PROMPT, split=False, **SAMPLED)
        stops = [one.token_ids[0] for one in whole]
        outcomes = await pair.ask_samples(PROMPT, **SAMPLED, stop_token_ids=stops)
        for outcome, stop in zip(outcomes, stops, strict=True):
            assert outcome.token_ids == [stop]
            assert outcome.finished is not None
            assert outcome.finished.finish_reason is FinishReason.STOP
        outcomes = await pair.ask_samples(PROMPT, **SAMPLED | {"max_tokens": 1})
        assert [one.token_ids for one in outcomes] == [[stop] for stop in stops]
        assert not any("failures" in name for name in pair.metrics)
        await pair.until_idle()


async def test_little_memory(tiny_model: Path) -> None:
    """Samples wait for room and are preempted; the answers are the same."""
    async with inline_pair(tiny_model) as pair:
        whole = await pair.ask_samples(PROMPT, split=False, **SAMPLED | {"max_tokens": 64})
    async with inline_pair(tiny_model, kv_blocks=25) as pair:
        outcomes = await pair.ask_samples(PROMPT, **SAMPLED | {"max_tokens": 64})
        assert said(outcomes) == said(whole)
        assert sum(one.finished.preemptions for one in outcomes if one.finished) > 0
        await pair.until_idle()


@pytest.mark.parametrize("split", [True, False])
async def test_a_cancel_ends_all_samples(tiny_model: Path, split: bool) -> None:
    async with inline_pair(tiny_model) as pair:
        asked = SAMPLED | {"max_tokens": 1700, "split": split}
        asking = asyncio.create_task(pair.ask_samples(PROMPT, **asked))
        await pair.until(lambda: pair.reports["decode"].running == 4)
        (stream_id,) = pair.streams
        pair.decode.send(CancelStream(stream_id=stream_id, reason=FinishReason.CANCELLED))
        await pair.until_idle()
        asking.cancel()


async def test_a_prefill_worker_that_knows_no_samples_is_replaced(tiny_model: Path) -> None:
    async with inline_pair(tiny_model) as pair:
        whole = await pair.ask_samples(PROMPT, split=False, **SAMPLED)
        pair.first_tokens_passed_on = 1
        outcomes = await pair.ask_samples(PROMPT, **SAMPLED)
        assert outcomes[0].fallback == "refused"
        assert said(outcomes) == said(whole)
        await pair.until_idle()
