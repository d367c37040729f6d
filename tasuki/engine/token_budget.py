"""How many tokens a step may have so that it stays short: found by running steps of growing size.

A token budget is not a time budget: what a token costs depends on the context it attends to. So the
steps tried are the worst there can be: as many requests as may run, sharing the whole cache, and a
chunk at the end of the longest context. On a prefill worker nothing decodes: the chunk alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tasuki.kv.layout import KVLayout
from tasuki.messages import SamplingParams
from tasuki.scheduler.config import SchedulerConfig
from tasuki.scheduler.output import ScheduledRequest, SchedulerOutput

STEP_SECONDS = 0.2
SAFETY = 0.8  # of it: other work on the machine, and what no trial shows
LEAST, MOST = 16, 2048
PRECISION = 16


def choose(run: Callable[[int], float], most: int = MOST) -> int:
    """The largest budget, a multiple of PRECISION, whose step takes at most STEP_SECONDS * SAFETY.

    `run` takes a number of tokens and returns the seconds of such a step. LEAST when even that
    takes longer.
    """
    limit = STEP_SECONDS * SAFETY
    below, below_seconds, size = 0, 0.0, LEAST
    while True:
        seconds = run(size)
        if seconds > limit:
            break
        below, below_seconds = size, seconds
        if size >= most:
            return most
        size = min(2 * size, most)
    if not below:
        return LEAST
    slope = (seconds - below_seconds) / (size - below)
    budget = below + int((limit - below_seconds) / slope)
    return max(LEAST, budget // PRECISION * PRECISION)


def worst_step(
    num_tokens: int, config: SchedulerConfig, layout: KVLayout, num_blocks: int
) -> SchedulerOutput:
    """A step of so many tokens that takes as long as any; to be run on an unused cache only."""
    capacity = num_blocks * layout.block_size
    longest = min(config.max_model_len, capacity)
    decoding = 0 if config.allocate_whole_prompt else config.max_num_seqs - 1
    chunk = max(1, num_tokens - decoding)
    singles = num_tokens - chunk
    chunk = min(chunk, longest)
    context = max(1, min(longest, capacity // config.max_num_seqs))
    blocks = list(range(num_blocks))
    sampling = SamplingParams(ignore_eos=True)

    def entry(key: int, end: int, count: int) -> ScheduledRequest:
        return ScheduledRequest(
            key=key,
            num_computed_tokens=end - count,
            token_ids=[0] * count,
            block_ids=blocks[: layout.blocks_for(end)],
            samples=True,
            num_logits=1,
            sampling=sampling,
            prompt_token_ids=[0],
            output_token_ids=[],
            eos_token_ids=frozenset(),
        )

    requests = [entry(key, context, 1) for key in range(singles)]
    return SchedulerOutput(0, (*requests, entry(singles, longest, chunk)))


def timed(step: Callable[[], object]) -> float:
    """Seconds of the second of two runs: the first one finds memory."""
    step()
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin
