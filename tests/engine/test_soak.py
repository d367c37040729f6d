"""An engine that has served ten thousand requests holds no more than one that has served some."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.config import WorkerConfig
from tasuki.convert.tiny import make_tiny
from tasuki.engine.engine import Engine
from tasuki.engine.memory import resident_memory
from tasuki.messages import FinishReason, SamplingParams
from tasuki.request import Request

REQUESTS, SETTLED = 10_000, 5_000
# oneDNN keeps what it made for the last thousand shapes of products: until all have been seen, a
# process grows a little, ever more slowly (measured: 14 MiB over the second half). A leaked block
# table or request would show in the counts below as well.
GROWTH = 24 << 20


def requests() -> Iterator[Request]:
    """Of every kind: cached beginnings, penalties, logprobs, and some that are cancelled."""
    rng = random.Random(4)
    for key in range(1, REQUESTS + 1):
        prompt = [rng.randrange(3)] * rng.randrange(1, 40) + [rng.randrange(250) for _ in range(9)]
        sampling = SamplingParams(
            max_tokens=rng.randrange(1, 30),
            ignore_eos=True,
            temperature=rng.choice((0.0, 0.8)),
            seed=key,
            presence_penalty=rng.choice((0.0, 0.0, 1.0)),
            logprobs=rng.choice((None, None, 3)),
        )
        yield Request(key, f"r{key}", prompt, sampling, frozenset(), 0.0)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_memory_is_flat_over_ten_thousand_requests(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "tiny")
    engine = Engine.load(WorkerConfig(model=str(model), kv_blocks=24, max_num_seqs=16))
    engine.warm_up()
    settled = done = 0
    waiting = requests()
    for number, request in enumerate(waiting, 1):
        engine.add(request)
        if number % 50 == 0:
            engine.cancel(request, FinishReason.CANCELLED)
        while len(engine.scheduler.waiting) > 8:
            done += sum(update.request.finish_reason is not None for update in engine.step())
        if number == SETTLED:
            settled = resident_memory()
    while engine.has_work:
        done += sum(update.request.finish_reason is not None for update in engine.step())
    engine.check_integrity()
    assert done >= 0.97 * REQUESTS
    assert engine.scheduler.preemptions > 0
    assert engine.blocks.num_free == engine.blocks.pool.num_blocks
    assert engine.blocks.remembered_keys == set()
    assert resident_memory() - settled < GROWTH
