"""Series whose growth is known: what is flat passes, and what leaks does not."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tests.chaos.flatness import Series, growth_per_hour, rise
from tests.chaos.process_samples import MEMORY_SHARE, MIB, SLACK, memory_bound

EVERY, COUNT = 10.0, 180  # half an hour, as the soak test takes them
MINUTE = 60.0


def series(of_time: dict[str, float], noise: float = 0.0, seed: int = 1) -> Series:
    """`start`, growth `per_minute`, and noise of up to `noise` on both sides."""
    rng = random.Random(seed)
    at = [number * EVERY for number in range(COUNT)]
    start, growth = of_time["start"], of_time.get("per_minute", 0.0) / MINUTE
    return [(t, start + growth * t + rng.uniform(-noise, noise)) for t in at]


@pytest.mark.parametrize("seed", range(20))
def test_noise_around_a_level_is_flat(seed: int) -> None:
    memory = series({"start": 300.0 * MIB}, noise=8.0 * MIB, seed=seed)
    assert abs(growth_per_hour(memory)) < memory_bound(memory)
    descriptors = series({"start": 40.0}, noise=SLACK / 2, seed=seed)
    assert rise(descriptors) <= SLACK


def test_a_descriptor_a_minute_is_found() -> None:
    leak = series({"start": 40.0, "per_minute": 1.0}, noise=SLACK / 2)
    assert rise(leak) > SLACK
    assert growth_per_hour(leak) == pytest.approx(60, rel=0.2)


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_leak_of_memory_is_found_in_the_noise(seed: int) -> None:
    leak = series({"start": 300.0 * MIB, "per_minute": 0.4 * MIB}, noise=4.0 * MIB, seed=seed)
    assert growth_per_hour(leak) > memory_bound(leak)
    assert growth_per_hour(leak) == pytest.approx(24 * MIB, rel=0.25)


def test_a_warm_up_and_spikes_are_no_growth() -> None:
    warm = [(t, min(t, 400.0) / 400.0 * 200.0 * MIB) for t, _ in series({"start": 0.0})]
    assert growth_per_hour(warm) == 0
    flat = [(t, v + (64.0 * MIB if t % 300.0 == 0 else 0.0)) for t, v in warm]
    assert growth_per_hour(flat) == 0
    assert all(b >= a for (_, a), (_, b) in pairwise(warm))
    assert rise(flat) <= 0


def test_the_bound_of_memory_is_a_share_of_much_and_a_sum_of_little() -> None:
    assert memory_bound(series({"start": 50.0 * MIB})) == 16 * MIB
    assert memory_bound(series({"start": 1000.0 * MIB})) == pytest.approx(MEMORY_SHARE * 1000 * MIB)


def test_too_few_samples_prove_nothing() -> None:
    with pytest.raises(ValueError, match="7 samples"):
        growth_per_hour([(float(t), 1.0) for t in range(7)])
