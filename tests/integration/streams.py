"""Runs requests through a cluster's front door and keeps what came back."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tasuki.client import Client, Placement, Timings, TokenLogprob, Usage
from tasuki.messages import FinishReason

NUM_TOKENS = 64
# what a fallback may be put down to when a prefill worker dies: whichever is seen to end first, its
# control stream or its data connection
DEATHS = ("prefill_died", "link_down")


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    placement: Placement
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    stall: float = field(default=0.0, compare=False)  # the longest wait for an output, in seconds


def prompt(length: int, seed: int | str = 0) -> list[int]:
    """Printable bytes of the tiny model's tokenizer, drawn from a seed."""
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(32, 127) for _ in range(length)]


async def ask(
    client: Client,
    token_ids: Sequence[int],
    *,
    max_tokens: int = NUM_TOKENS,
    into: list[int] | None = None,
    **sampling: Any,
) -> Answer:
    """One whole answer; checks that indices go on without a gap or a repetition. Tokens are added
    to `into` as they come.
    """
    tokens: list[int] = [] if into is None else into
    stall, last = 0.0, time.monotonic()
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []
    text = ""
    options: Any = {"ignore_eos": True} | sampling
    async for output in client.generate(
        prompt_token_ids=token_ids, max_tokens=max_tokens, **options
    ):
        assert output.index == len(tokens)
        stall, last = max(stall, time.monotonic() - last), time.monotonic()
        tokens += output.token_ids
        logprobs += output.logprobs
        prompt_logprobs += output.prompt_logprobs
        text += output.text
    assert output.finish_reason is not None
    assert output.usage is not None
    assert output.timings is not None
    assert output.placement is not None
    return Answer(
        tokens,
        text,
        output.finish_reason,
        output.usage,
        output.timings,
        output.placement,
        output.stop_reason,
        logprobs,
        prompt_logprobs,
        stall,
    )


async def keep_prefilling(client: Client, load: str, enough: asyncio.Event) -> int:
    """One long prompt after another, none of them seen before, until `enough`; how many. `load`
    names this caller, among all that share a cluster.
    """
    asked = 0
    while not enough.is_set():
        await ask(client, prompt(1900, seed=f"{load} {asked}"), max_tokens=2)
        asked += 1
    return asked


@dataclass
class Sample:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    completion_tokens: int = 0  # as its last output says


async def ask_samples(
    client: Client, token_ids: Sequence[int], n: int = 1, **sampling: Any
) -> list[Sample]:
    """All samples of one request; checks that indices go on in each."""
    samples = [Sample() for _ in range(n)]
    options: Any = {"ignore_eos": True, "max_tokens": NUM_TOKENS} | sampling
    async for output in client.generate(prompt_token_ids=token_ids, n=n, **options):
        sample = samples[output.sample_index]
        assert output.index == len(sample.token_ids)
        assert not sample.completion_tokens, "more after its end"
        sample.token_ids += output.token_ids
        sample.text += output.text
        if output.usage is not None:
            sample.completion_tokens = output.usage.completion_tokens
    assert output.placement is not None
    assert all(sample.completion_tokens == len(sample.token_ids) for sample in samples)
    return samples
