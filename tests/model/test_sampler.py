"""The sampler: greedy ties, a noise that depends on nothing else, and the right distribution."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasuki.errors import TasukiError
from tasuki.messages import SamplingParams
from tasuki.model.sampling.noise import gumbel, gumbel_of
from tasuki.model.sampling.processors import Choice
from tasuki.model.sampling.sampler import Sampler

GREEDY = SamplingParams()
PINNED = [
    -0.05263803663028068,
    2.9730751181450588,
    1.3811857756452757,
]  # seed 42, position 17, ids 0 to 2


def warm(seed: int, temperature: float = 1.0, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, **more)


def choice(params: SamplingParams, position: int = 0, key: int = 1) -> Choice:
    """At a position, with a prompt of so many different tokens."""
    return Choice(key, params, range(position), [])


def sample(logits: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> list[int]:
    choices = [choice(*pair) for pair in zip(params, positions, strict=True)]
    return Sampler().sample(logits, choices)


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [-1.0, -2.0, -1.0, -3.0]])
    assert sample(logits, [GREEDY, GREEDY], [5, 6]) == [1, 0]
    assert sample(torch.zeros(40, 50_000), [GREEDY] * 40, [0] * 40) == [0] * 40
    bias = SamplingParams(logit_bias={3: 1.0, 1: 1.0, 0: 4.0})
    assert sample(logits, [bias, bias], [0, 0]) == [0, 0]
    assert sample(torch.zeros(1, 4), [SamplingParams(logit_bias={0: -1.0})], [0]) == [1]


def test_no_rows() -> None:
    assert sample(torch.empty(0, 9), [], []) == []


def test_neighbours_and_calls_before_do_not_matter() -> None:
    """Also with every processor, and with counts that were kept from one call to the next."""
    generator = torch.Generator().manual_seed(1)
    rows = [
        SamplingParams(),
        warm(3),
        warm(2**64 - 1, 0.7, top_k=20),
        warm(0, 9.0, top_p=0.7),
        warm(3, min_p=0.05, presence_penalty=1.0),
        SamplingParams(repetition_penalty=3.0, frequency_penalty=0.5),
        warm(1 << 63, repetition_penalty=1.2, top_k=50, top_p=0.9, logit_bias={5: 3.0}),
        SamplingParams(min_tokens=9, stop_token_ids=[1, 2], logit_bias={1: 100.0, 2: 99.0}),
    ]
    together = Sampler()
    outputs: list[list[int]] = [[] for _ in rows]
    for step in range(12):
        logits = torch.randn(len(rows), 700, generator=generator) * 4
        here = [row for row in range(len(rows)) if (step + row) % 5]  # some miss a step
        choices = [Choice(row, rows[row], [7, 8, 7], outputs[row]) for row in here]
        got = together.sample(logits[here], choices)
        for row, one, token_id in zip(here, choices, got, strict=True):
            alone = dataclasses.replace(one, key=99, output_token_ids=list(outputs[row]))
            assert Sampler().sample(logits[row : row + 1], [alone]) == [token_id]
        for row, token_id in zip(here, got, strict=True):
            outputs[row].append(token_id)
    assert not {1, 2} & set(outputs[7][:9])
    assert outputs[7][9] in {1, 2}


def test_noise_of_a_token_does_not_depend_on_the_vocabulary() -> None:
    long = gumbel(7, 0, 3, 5000)
    for size in (1, 31, 1000, 1024, 1025, 4999):
        assert torch.equal(gumbel(7, 0, 3, size), long[:size])


@settings(deadline=None)
@given(st.sets(st.integers(0, 4999), min_size=1, max_size=1500))
def test_noise_of_some_tokens_is_that_of_all(token_ids: set[int]) -> None:
    ids = torch.tensor(sorted(token_ids))
    assert torch.equal(gumbel_of(ids, 7, 0, 3), gumbel(7, 0, 3, 5000)[ids])


def test_noise_depends_on_seed_position_and_sample_index() -> None:
    seeds = (0, 1, 2, 1 << 40, 1 << 63, 2**64 - 1)
    noises = [gumbel(seed, 0, position, 64) for seed in seeds for position in (0, 1, 2, 8000)]
    noises += [gumbel(seed, 2, 1, 64) for seed in seeds]
    for i, noise in enumerate(noises):
        for other in noises[:i]:
            assert not (noise == other).any()


def test_noise_is_pinned() -> None:
    """These numbers may not change: a worker of another version must continue a stream."""
    assert gumbel(42, 0, 17, 3).tolist() == pytest.approx(PINNED, abs=1e-12)


def test_noise_is_gumbel() -> None:
    noise = gumbel(1, 0, 1, 1_000_000)
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772156649) < 5e-3
    assert abs(noise.var() - math.pi**2 / 6) < 1.5e-2


@pytest.mark.parametrize(
    ("by", "params", "kept"),
    [
        ("seed", {}, 8),
        ("seed", {"temperature": 0.5}, 8),
        ("position", {"temperature": 2.0}, 8),
        ("seed", {"top_k": 4}, 4),
        ("position", {"top_p": 0.8}, 4),
        ("seed", {"min_p": 0.2}, 4),
    ],
)
def test_distribution(by: str, params: dict[str, Any], kept: int) -> None:
    """Chi-square against softmax(logits / temperature) of what is left, over seeds or positions."""
    row = torch.tensor([2.0, 1.0, 0.0, 0.5, -1.0, 1.5, 0.2, -0.3])
    count = 4000
    seeds = range(count) if by == "seed" else [5] * count
    positions = [9] * count if by == "seed" else list(range(count))
    chosen = sample(
        row.expand(count, -1), [warm(s, **{"temperature": 1.0} | params) for s in seeds], positions
    )
    found = torch.bincount(torch.tensor(chosen), minlength=8).double()
    order = row.argsort(descending=True)[:kept]
    assert found.sum() == found[order].sum()
    temperature = params.get("temperature", 1.0)
    expected = (row[order].double() / temperature).softmax(0) * count
    limit = {8: 24.3, 4: 16.3}[kept]  # 7 and 3 degrees of freedom, p = 0.001
    assert ((found[order] - expected) ** 2 / expected).sum() < limit


def test_extreme_temperatures() -> None:
    logits = torch.tensor([[1.0, 5.0, 4.999]])
    assert sample(logits, [warm(1, 1e-300)], [0]) == [1]
    hot = {sample(logits, [warm(seed, 1e300)], [0])[0] for seed in range(60)}
    assert hot == {0, 1, 2}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [GREEDY, warm(1)])
def test_logits_that_are_not_finite_are_an_error_that_names_the_row(
    bad: float, params: SamplingParams
) -> None:
    logits = torch.zeros(3, 8)
    logits[1, 4] = bad
    with pytest.raises(TasukiError, match="row 1") as caught:
        sample(logits, [params] * 3, [0, 1, 2])
    assert caught.value.reason == "logits"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=30), st.lists(st.integers(0, 9), max_size=30))
def test_counts_that_were_kept_are_those_counted_anew(prompt: list[int], output: list[int]) -> None:
    """A penalty that differs by one count would choose another token somewhere here."""
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.3, presence_penalty=0.2)
    logits = torch.linspace(1.0, 2.0, 10).repeat(1, 1)
    kept = Sampler()
    for count in range(len(output) + 1):
        one = Choice(1, params, prompt, output[:count])
        assert kept.sample(logits, [one]) == Sampler().sample(logits, [one])
