"""Split, colocated, fallen back, preempted, on cached blocks, in a batch, on two threads: all
logits of a stream are the same bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tasuki.messages import TokenLogprob
from tasuki.model.sampling.processors import Choice
from tasuki.scheduler.output import ModelRunnerOutput
from tasuki.transfer.connectors.loopback_fault import PlannedFault, Verdict
from tests.integration.streams import prompt
from tests.pair.relay import InlinePair, Outcome, inline_pair

DTYPES = ("float32", "bfloat16")
PROMPTS = [prompt(length, seed=length) for length in (100, 161, 75, 130)]
BLOCKS = [-(-len(one) // 16) for one in PROMPTS]
Stream = dict[int, torch.Tensor]  # logits of each output index


@dataclass
class Logits:
    """All logits that either engine sampled from. One that is computed twice must not differ."""

    streams: dict[tuple[int, ...], Stream] = field(default_factory=dict)
    computed: int = 0

    def listen(self, pair: InlinePair) -> None:
        for core in pair.cores.values():
            runner = core.engine.runner
            runner._sample = self._noting(runner._sample)  # type: ignore[method-assign]

    def _noting(self, sample: Callable[..., ModelRunnerOutput]) -> Callable[..., ModelRunnerOutput]:
        def note_and_sample(
            step: int,
            logits: torch.Tensor,
            choices: Sequence[Choice],
            prompt_logprobs: dict[int, list[TokenLogprob]],
        ) -> ModelRunnerOutput:
            for row, choice in enumerate(choices):
                self._note(choice, logits[row].clone())
            return sample(step, logits, choices, prompt_logprobs)

        return note_and_sample

    def _note(self, choice: Choice, logits: torch.Tensor) -> None:
        stream = self.streams.setdefault(tuple(choice.prompt_token_ids), {})
        known = stream.setdefault(len(choice.output_token_ids), logits)
        assert torch.equal(known, logits)
        self.computed += 1


async def run(
    model: Path,
    count: int,
    settings: dict[str, Any],
    *,
    fault: dict[int, Verdict] | None = None,
    split: bool = True,
    together: bool = True,
    times: int = 1,
) -> tuple[Logits, list[Outcome], dict[str, float]]:
    """Every prompt, `times` over, its output `count` tokens long."""
    logits = Logits()
    outcomes: list[Outcome] = []
    async with inline_pair(model, PlannedFault(fault or {}), **settings) as pair:
        logits.listen(pair)
        for _ in range(times):
            asked = (pair.ask(one, split=split, max_tokens=count) for one in PROMPTS)
            if together:
                outcomes += await asyncio.gather(*asked)
            else:
                outcomes += [await one for one in asked]
        await pair.until_idle()
        metrics = dict(pair.metrics)
    torch.set_num_threads(1)
    return logits, outcomes, metrics


def check(found: Logits, expected: Logits, count: int) -> None:
    assert len(found.streams) == len(PROMPTS)
    for asked in PROMPTS:
        left, right = found.streams[tuple(asked)], expected.streams[tuple(asked)]
        assert sorted(left) == sorted(right) == list(range(count))
        assert all(torch.equal(left[index], right[index]) for index in right)


async def check_all(model: Path, dtype: str, count: int, *, native: bool = True) -> None:
    base = {"dtype": dtype, "native": native}
    alone, outcomes, _ = await run(model, count, base, split=False, together=False)
    assert all(len(outcome.token_ids) == count for outcome in outcomes)
    for asked in PROMPTS:
        logits = alone.streams[tuple(asked)]
        assert len({tuple(one[:64].tolist()) for one in logits.values()}) == count

    batch, _, _ = await run(model, count, base | {"threads": 2}, split=False)
    check(batch, alone, count)

    split, outcomes, _ = await run(model, count, base)
    check(split, alone, count)
    ends = [outcome.finished for outcome in outcomes if outcome.finished]
    assert [end.handoff.blocks for end in ends] == BLOCKS
    assert [end.computed_prompt_tokens for end in ends] == [0] * len(PROMPTS)

    # it closes the link: whatever has not arrived is computed here, on top of what has
    fault = {sum(BLOCKS) - 5: Verdict.FLIP}
    fallen, outcomes, _ = await run(model, count, base, fault=fault)
    check(fallen, alone, count)
    assert "digest" in [outcome.fallback for outcome in outcomes]
    assert any(outcome.kept_tokens for outcome in outcomes)

    # room for all prompts, and for half of the outputs
    few = sum(BLOCKS) + len(PROMPTS) * (count // 2 // 16)
    preempted, _, metrics = await run(model, count, base | {"kv_blocks": few}, split=False)
    check(preempted, alone, count)
    assert metrics["decode preemptions_total"] > 0

    cached, outcomes, _ = await run(model, count, base | {"prefix_caching": True}, times=2)
    check(cached, alone, count)
    again = [outcome.finished.cached_tokens for outcome in outcomes[4:] if outcome.finished]
    assert again == [(len(one) - 1) // 16 * 16 for one in PROMPTS]


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
async def test_tiny(tiny_model: Path, dtype: str, native: bool) -> None:
    await check_all(tiny_model, dtype, 200 if native else 48, native=native)


@pytest.mark.demo
@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", DTYPES)
async def test_demo(demo_directory: Path, dtype: str) -> None:
    await check_all(demo_directory, dtype, 200)
