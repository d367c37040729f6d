"""The least time a model's step can take on a machine with given limits. Pure arithmetic.

Counts the linears and what must be read. Norms, rotary factors and attention's own arithmetic are
left out, so nobody is faster than this, and nobody gets quite there.
"""

from __future__ import annotations

from tasuki.model.config import ModelConfig

BLOCK = 16
FLOAT_BYTES = 4


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
    config: ModelConfig, batch: int, positions: int, gemm: float, memory_read: float
) -> float:
    """Seconds per step with `positions` of KV for each of `batch`: all read, or all computed."""
    weights = layer_weights(config) + head_weights(config)
    kv_bytes = config.kv_layout(BLOCK).block_bytes // BLOCK * positions * batch
    return max((weights * FLOAT_BYTES + kv_bytes) / memory_read, 2 * weights * batch / gemm)
