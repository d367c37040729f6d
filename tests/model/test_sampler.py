"""The sampler: greedy ties, a noise that depends on nothing else, and the right distribution."""

from __future__ import annotations

import math

import pytest
import torch

from tasuki.errors import TasukiError
from tasuki.messages import SamplingParams
from tasuki.model.sampler import gumbel, sample

GREEDY = SamplingParams()
PINNED = [
    -0.05263803663028068,
    2.9730751181450588,
    1.3811857756452757,
]  # seed 42, position 17, ids 0 to 2


def warm(seed: int, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed)


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [-1.0, -2.0, -1.0, -3.0]])
    assert sample(logits, [GREEDY, GREEDY], [5, 6]) == [1, 0]
    assert sample(torch.zeros(1, 50_000), [GREEDY], [0]) == [0]


def test_no_rows() -> None:
    assert sample(torch.empty(0, 9), [], []) == []


def test_neighbours_do_not_matter() -> None:
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(1))
    params = [warm(3), GREEDY, warm(2**64 - 1, 0.7), warm(0, 9.0), warm(3), warm(1 << 63)]
    positions = [1, 2, 900, 4, 5, 6]
    together = sample(logits, params, positions)
    for row in range(6):
        alone = sample(logits[row : row + 1], params[row : row + 1], positions[row : row + 1])
        assert alone == together[row : row + 1]


def test_noise_of_a_token_does_not_depend_on_the_vocabulary() -> None:
    long = gumbel(7, 3, 5000)
    for size in (1, 31, 1000, 1024, 1025, 4999):
        assert torch.equal(gumbel(7, 3, size), long[:size])


def test_noise_depends_on_seed_and_position() -> None:
    seeds = (0, 1, 2, 1 << 40, 1 << 63, 2**64 - 1)
    noises = [gumbel(seed, position, 64) for seed in seeds for position in (0, 1, 2, 8000)]
    for i, noise in enumerate(noises):
        for other in noises[:i]:
            assert not (noise == other).any()


def test_noise_is_pinned() -> None:
    """These numbers may not change: a worker of another version must continue a stream."""
    assert gumbel(42, 17, 3).tolist() == pytest.approx(PINNED, abs=1e-12)


def test_noise_is_gumbel() -> None:
    noise = gumbel(1, 1, 1_000_000)
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772156649) < 5e-3
    assert abs(noise.var() - math.pi**2 / 6) < 1.5e-2


@pytest.mark.parametrize(("temperature", "by"), [(1.0, "seed"), (0.5, "seed"), (2.0, "position")])
def test_distribution(temperature: float, by: str) -> None:
    """Chi-square against softmax(logits / temperature), over seeds or over positions."""
    row = torch.tensor([2.0, 1.0, 0.0, 0.5, -1.0, 1.5, 0.2, -0.3])
    count = 4000
    params = [warm(i if by == "seed" else 5, temperature) for i in range(count)]
    positions = [9 if by == "seed" else i for i in range(count)]
    chosen = torch.tensor(sample(row.expand(count, -1), params, positions))
    found = torch.bincount(chosen, minlength=8).double()
    expected = (row.double() / temperature).softmax(0) * count
    assert ((found - expected) ** 2 / expected).sum() < 24.3  # 7 degrees of freedom, p = 0.001


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
