"""Whole streams, 200 tokens each: every logit is the same bits alone, in a batch, in chunks, on
more threads, after losing the cache, and on top of another request's blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tasuki.model.transformer import CausalLM
from tests.model.paged import Paged, Run

TOKENS = 200
LENGTHS = (1, 15, 16, 17, 33, 64, 65, 100, 128, 150, 2, 90, 48, 200, 7, 111)
WAYS = [(dtype, native) for dtype in ("float32", "bfloat16") for native in (True, False)]


def prompts(model: CausalLM, lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(12)
    vocab = model.config.vocab_size
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


def alone(model: CausalLM, asked: Sequence[list[int]], count: int) -> list[torch.Tensor]:
    """Each by itself, its prompt in one piece."""
    torch.set_num_threads(1)
    streams = []
    for prompt in asked:
        paged = Paged(model, 40)
        run = paged.start(prompt, count)
        paged.generate([run], count, budget=512)
        streams.append(torch.stack(run.logits))
    return streams


def together(
    model: CausalLM, asked: Sequence[list[int]], count: int, budget: int, threads: int = 1
) -> list[torch.Tensor]:
    torch.set_num_threads(threads)
    paged = Paged(model, 600)
    runs = [paged.start(prompt, count) for prompt in asked]
    paged.generate(runs, count, budget)
    return [torch.stack(run.logits) for run in runs]


def check(model: CausalLM, lengths: Sequence[int], count: int) -> None:
    asked = prompts(model, lengths)
    expected = alone(model, asked, count)
    # a greedy stream may repeat its tokens; its logits do not
    assert all(len(set(map(tuple, logits[:, :64].tolist()))) == count for logits in expected)
    for budget, threads in ((512, 1), (48, 1), (48, 2)):
        found = together(model, asked, count, budget, threads)
        assert all(map(torch.equal, found, expected)), (budget, threads)
    torch.set_num_threads(1)
    recomputed(model, asked[-1], expected[-1])
    shared(model, asked[-3], expected[-3])


def recomputed(model: CausalLM, prompt: list[int], expected: torch.Tensor) -> None:
    """What preemption does: half of the stream is computed again from its tokens."""
    half = len(expected) // 2
    known = prompt + expected[:half].argmax(-1).tolist()
    paged = Paged(model, 40)
    run = paged.start(known, len(expected))
    paged.prefill(run, itertools.cycle((13, 1, 30)))
    run.tokens.append(int(run.logits[-1].argmax()))
    paged.generate([run], len(expected) - half)
    assert torch.equal(torch.stack(run.logits), expected[half:])


def shared(model: CausalLM, prompt: list[int], expected: torch.Tensor) -> None:
    """What a prefix-cache hit does: another request's full blocks, computed in other chunks."""
    paged = Paged(model, 60)
    first = paged.start(prompt, 0)
    paged.prefill(first, itertools.repeat(7))
    full = (len(prompt) - 1) // paged.layout.block_size
    own = paged.start(prompt, len(expected))
    hit = Run(list(prompt), first.block_ids[:full] + own.block_ids[full:], len(prompt))
    hit.computed = full * paged.layout.block_size
    paged.generate([hit], len(expected))
    assert torch.equal(torch.stack(hit.logits), expected)


@pytest.mark.parametrize(("dtype", "native"), WAYS)
def test_tiny(tiny_directory: Path, dtype: str, native: bool) -> None:
    lengths = LENGTHS[::2] if native else LENGTHS[1::6]  # plain torch takes its time
    check(CausalLM.load(tiny_directory, dtype=dtype, native=native), lengths, TOKENS)


@pytest.mark.demo
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_demo_in_short(demo_directory: Path, dtype: str) -> None:
    check(CausalLM.load(demo_directory, dtype=dtype, native=True), (17, 40, 30), 8)


@pytest.mark.demo
@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("dtype", "native"), WAYS)
def test_demo(demo_directory: Path, dtype: str, native: bool) -> None:
    check(CausalLM.load(demo_directory, dtype=dtype, native=native), LENGTHS, TOKENS)
