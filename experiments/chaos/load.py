"""The load of a chaos run: clients that ask one request after the other, and keep the answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import aclosing

from experiments.chaos.requests import Ask
from experiments.chaos.tally import Answer, Tally
from tasuki.client import Client
from tasuki.errors import NoKVError, QueueFullError, TasukiError, UnavailableError

REFUSALS = (UnavailableError, NoKVError, QueueFullError)
REFUSED_PAUSE = 0.2  # seconds
PATIENCE = 60.0  # seconds for a request, refusals included
CANCELLED_SHARE = 0.1


async def ask_once(client: Client, ask: Ask, cancel_after: int | None = None) -> Answer:
    """One attempt. Raises what refused it before anything was answered."""
    clock = asyncio.get_running_loop().time
    answer = Answer([[] for _ in range(ask.num_samples)])
    last = clock()
    stream = client.generate(
        prompt_token_ids=ask.prompt_token_ids,
        max_tokens=ask.max_tokens,
        timeout=PATIENCE,
        **ask.sampling,
    )
    try:
        async with aclosing(stream):
            async for output in stream:
                answer.stall, last = max(answer.stall, clock() - last), clock()
                answer.take(output.sample_index, output.index, output.token_ids)
                if cancel_after is not None and len(answer.samples[0]) >= cancel_after:
                    answer.cancelled = True
                    return answer
    except TasukiError as error:
        if not any(answer.samples) and isinstance(error, REFUSALS):
            raise
        answer.error = f"{error.code}: {error.reason}"
    return answer


async def ask_until_taken(client: Client, ask: Ask, tally: Tally, cancel: int | None) -> Answer:
    """Ask again while no worker can take it: nothing was answered yet, so nothing is lost."""
    clock = asyncio.get_running_loop().time
    began = clock()
    while True:
        try:
            return await ask_once(client, ask, cancel)
        except REFUSALS as error:
            if clock() - began > PATIENCE:
                answer = Answer([[] for _ in range(ask.num_samples)])
                answer.error = f"{error.code}: {error.reason}"
                return answer
        tally.refused += 1
        await asyncio.sleep(REFUSED_PAUSE)


async def keep_asking(
    client: Client,
    asks: Sequence[Ask],
    expected: Sequence[list[list[int]]],
    tally: Tally,
    rng: random.Random,
    enough: Callable[[], bool],
) -> None:
    """One client: random requests, some of them given up midway, until `enough`."""
    while not enough():
        ask = rng.choice(asks)
        cancel = rng.randrange(ask.max_tokens) if rng.random() < CANCELLED_SHARE else None
        answer = await ask_until_taken(client, ask, tally, cancel)
        tally.count(answer, expected[ask.number])
