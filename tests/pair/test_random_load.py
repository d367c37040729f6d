"""Random requests with several samples, under faults, cancels and want of memory: those that were
let be say what each says alone on one worker.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tasuki.messages import CancelStream, FinishReason
from tasuki.transfer.connectors.loopback_fault import PlannedFault, Verdict
from tests.integration.streams import prompt
from tests.pair.relay import InlinePair, Outcome, inline_pair
from tests.pair.test_samples import said

NUM_REQUESTS = 12
ODD: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 7, "min_p": 0.02},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"stop_token_ids": list(range(60)), "min_tokens": 1},
    {"stop_token_ids": list(range(64, 128))},
)


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    how: dict[str, Any]
    cancelled_when: int | None  # so many requests have ended


def draw(rng: random.Random) -> list[Asked]:
    prompts = [prompt(rng.choice((1, 15, 16, 17, 64, 90, 200, 299)), seed) for seed in range(5)]
    return [
        Asked(
            rng.choice(prompts),
            {
                "n": rng.choice((1, 2, 3, 8)),
                "temperature": 1.0,
                "seed": rng.randrange(1000),
                "max_tokens": rng.choice((1, 2, 17, 40, 80)),
                "split": rng.random() < 0.8,
                "cache_salt": rng.choice(("", "salt")),
                **rng.choice(ODD),
            },
            rng.randrange(NUM_REQUESTS // 2) if rng.random() < 0.2 else None,
        )
        for _ in range(NUM_REQUESTS)
    ]


def settings(rng: random.Random) -> dict[str, Any]:
    return {
        "kv_blocks": rng.choice((24, 25, 26, 200)),
        "max_num_seqs": rng.choice((16, 64)),
        "max_num_batched_tokens": rng.choice((64, 256)),
        "prefix_caching": rng.random() < 0.7,
        "admission": rng.choice(("optimistic",) * 4 + ("reserve_max",)),
        "step_order": rng.choice(("decode_first", "prefill_first")),
    }


def fault(rng: random.Random) -> PlannedFault:
    plan = {rng.randrange(60): Verdict.FLIP for _ in range(rng.randrange(4))}
    if rng.random() < 0.2:
        plan[rng.randrange(20, 60)] = Verdict.DROP
    return PlannedFault(plan)


async def ask_all(pair: InlinePair, load: list[Asked]) -> list[list[Outcome] | None]:
    """Of all at once; None of one that was cancelled."""
    ended = 0

    async def ask(one: Asked) -> list[Outcome]:
        nonlocal ended
        outcomes = await pair.ask_samples(one.prompt, **one.how)
        ended += 1
        async with pair.changed:
            pair.changed.notify_all()
        return outcomes

    calls = [asyncio.ensure_future(ask(one)) for one in load]
    await asyncio.sleep(0)  # each has taken its stream by now, in order
    streams = list(pair.streams)[-len(load) :]

    async def cancel(number: int, when: int) -> None:
        await pair.until(lambda: ended >= when)
        pair.decode.send(CancelStream(stream_id=streams[number], reason=FinishReason.CANCELLED))

    cancelled = {
        n: one.cancelled_when for n, one in enumerate(load) if one.cancelled_when is not None
    }
    await asyncio.gather(*(cancel(number, when) for number, when in cancelled.items()))
    answers = [None if n in cancelled else await call for n, call in enumerate(calls)]
    await pair.until_idle()
    for call in calls:
        call.cancel()
    return answers


async def check(model: Path, seed: int) -> Counter[str]:
    """How often what the load is meant to meet was met."""
    rng = random.Random(seed)
    load, how, faults = draw(rng), settings(rng), fault(rng)
    async with inline_pair(model) as pair:
        alone = [await pair.ask_samples(one.prompt, **one.how | {"split": False}) for one in load]
    met: Counter[str] = Counter()
    async with inline_pair(model, faults, **how) as pair:
        for one, outcomes, expected in zip(load, await ask_all(pair, load), alone, strict=True):
            if outcomes is None:
                met["cancelled"] += 1
                continue
            assert outcomes[0].failed is None, one
            assert said(outcomes) == said(expected), one
            met["fell back"] += outcomes[0].fallback != ""
            met["preempted"] += sum(each.finished.preemptions for each in outcomes if each.finished)
    return met


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "group", [pytest.param(n, marks=[pytest.mark.soak] if n else []) for n in range(20)]
)
async def test_each_says_what_it_says_alone(tiny_model: Path, group: int) -> None:
    met: Counter[str] = Counter()
    for seed in range(10 * group, 10 * group + 10):
        met += await check(tiny_model, seed)
    assert set(met) == {"cancelled", "fell back", "preempted"}
