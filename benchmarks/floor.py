"""The least time a model's step can take on a machine with given limits. Pure arithmetic.

Counts the linears and what must be read. Norms, rotary factors and attention's own arithmetic are
left out, so nobody is faster than this, and nobody gets quite there.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.machine import Limits
from tasuki.kv.layout import DTYPE_BYTES
from tasuki.model.config import ModelConfig

BLOCK = 16
# What is asked for: seconds of each cell on the design's reference machine, with that machine's
# limits; float32, one thread. Its second attention kernel, and half of what transformers takes.
SECOND_KERNEL = {
    "P128": 128 / 970, "P512": 512 / 970, "P2048": 2048 / 780,
    "D1": 19.6e-3, "D8": 28.8e-3, "D32": 70e-3,
}  # fmt: skip
TWICE_TRANSFORMERS = {
    "P128": 64 / 382, "P512": 256 / 357, "P2048": 1024 / 297,
    "D1": 41e-3 / 2, "D8": 81.9e-3 / 2, "D32": 188e-3 / 2,
}  # fmt: skip
REFERENCE_LIMITS = Limits(memory_read=42.7e9, plain_gemm=112e9, prepacked_gemm=265e9)
REFERENCE_CONTEXT = 224


def head_weights(config: ModelConfig) -> int:
    return config.vocab_size * config.hidden_size


def layer_weights(config: ModelConfig) -> int:
    """Weights that every token is multiplied with; the embedding is only looked up."""
    attention = 2 * config.hidden_size * (config.num_heads + config.num_kv_heads) * config.head_dim
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def prefill_floor(config: ModelConfig, tokens: int, gemm: float) -> float:
    """Seconds for a prompt at `gemm` operations a second; the head sees its last token only."""
    return 2 * (layer_weights(config) * tokens + head_weights(config)) / gemm


def decode_floor(
    config: ModelConfig, batch: int, positions: int, limits: Limits, dtype: str = "float32"
) -> float:
    """Seconds per step with `positions` of KV for each of `batch`: all read, or all computed."""
    weights = layer_weights(config) + head_weights(config)
    kv_bytes = config.kv_layout(BLOCK, dtype).block_bytes // BLOCK * positions * batch
    read = (weights * DTYPE_BYTES[dtype] + kv_bytes) / limits.memory_read
    return max(read, 2 * weights * batch / limits.gemm)


def share_of_reference(
    config: ModelConfig, cell: str, seconds: float, floor: float, reference: Mapping[str, float]
) -> float:
    """How near its machine's floor a cell comes, as a multiple of a reference's nearness to the
    floor of its own: what is left of a comparison when the machines are taken out.
    """
    number = int(cell[1:])
    if cell.startswith("P"):
        reference_floor = prefill_floor(config, number, REFERENCE_LIMITS.gemm)
    else:
        reference_floor = decode_floor(config, number, REFERENCE_CONTEXT, REFERENCE_LIMITS)
    return (floor / seconds) / (reference_floor / reference[cell])
