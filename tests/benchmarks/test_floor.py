"""The least time a step can take, on a model small enough to count by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.floor import (
    REFERENCE_LIMITS,
    SECOND_KERNEL,
    TWICE_TRANSFORMERS,
    decode_floor,
    head_weights,
    layer_weights,
    prefill_floor,
    share_of_reference,
)
from benchmarks.machine import Limits
from tasuki.convert.random_llama import RandomLlama, make_random_llama
from tasuki.model.config import ModelConfig

SPEC = RandomLlama(
    vocab_size=100, hidden_size=8, intermediate_size=16, num_layers=2, num_heads=2,
    num_kv_heads=1, head_dim=4,
)  # fmt: skip
LAYERS = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16)  # q, k and v, output, mlp
HEAD = 800


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    make_random_llama(tmp_path, SPEC)
    return ModelConfig.from_directory(tmp_path)


def test_weights_are_those_that_are_multiplied(config: ModelConfig) -> None:
    assert (layer_weights(config), head_weights(config)) == (LAYERS, HEAD)


def test_a_prompt_meets_the_head_once(config: ModelConfig) -> None:
    assert prefill_floor(config, 10, gemm=2.0) == 10 * LAYERS + HEAD


def test_a_step_reads_or_computes_whichever_takes_longer(config: ModelConfig) -> None:
    kv = 2 * 2 * 1 * 4 * 4 * 5 * 3  # layers, K and V, heads, head_dim, bytes, positions, batch
    slow_memory = decode_floor(config, 3, 5, Limits(1.0, 1e12, 1e12))
    assert slow_memory == 4 * (LAYERS + HEAD) + kv
    assert decode_floor(config, 3, 5, Limits(1e12, 1.0, 2.0)) == 3 * (LAYERS + HEAD)
    half = decode_floor(config, 3, 5, Limits(1.0, 1e12, 1e12), "bfloat16")
    assert half == slow_memory / 2


@pytest.mark.parametrize("reference", [SECOND_KERNEL, TWICE_TRANSFORMERS], ids=["kernel", "twice"])
def test_as_near_the_floor_as_the_reference_is_one(
    config: ModelConfig, reference: dict[str, float]
) -> None:
    floor = prefill_floor(config, 512, REFERENCE_LIMITS.gemm)
    taken = reference["P512"]
    assert share_of_reference(config, "P512", taken, floor, reference) == pytest.approx(1.0)
    assert share_of_reference(config, "P512", taken / 2, floor, reference) == pytest.approx(2.0)
    floor = decode_floor(config, 8, 224, REFERENCE_LIMITS)
    taken = reference["D8"]
    assert share_of_reference(config, "D8", taken, floor, reference) == pytest.approx(1.0)
