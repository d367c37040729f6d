"""Gumbel noise of one token to be chosen. Knows nothing about logits.

The noise is a hash of (seed, sample index, position, token id) alone, so that the same request gets
the same tokens on any worker, in any batch, after any retry.
"""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1
# Constants of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
# 2014).
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_RUN = 1024  # noise is computed in whole runs, so that the last element rounds like any other


def gumbel(seed: int, sample_index: int, position: int, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise for token ids 0 .. vocab_size - 1, float64."""
    count = -(-vocab_size // _RUN) * _RUN
    counters = torch.arange(1, count + 1, dtype=torch.int64)
    return _noise(_key(seed, sample_index, position), counters)[:vocab_size]


def gumbel_of(token_ids: torch.Tensor, seed: int, sample_index: int, position: int) -> torch.Tensor:
    """The same noise for some ids only, int64 [n]: bit for bit what `gumbel` has for them."""
    count = token_ids.shape[0]
    counters = torch.ones(-(-count // _RUN) * _RUN, dtype=torch.int64)
    counters[:count] += token_ids
    return _noise(_key(seed, sample_index, position), counters)[:count]


def _key(seed: int, sample_index: int, position: int) -> int:
    key = seed & _MASK
    for word in (sample_index, position):
        key = _mix((key + _GAMMA * (word + 1)) & _MASK)
    return key


def _noise(key: int, counters: torch.Tensor) -> torch.Tensor:
    bits = _mix_tensor(counters * _signed(_GAMMA) + _signed(key))
    # 53 bits, in the middle of their interval: never 0 and never 1.
    uniform = (_shift(bits, 11).double() + 0.5) * 2.0**-53
    return uniform.log_().neg_().log_().neg_()


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _mix_tensor(values: torch.Tensor) -> torch.Tensor:
    """`_mix` of int64 tensors, whose products wrap around."""
    values = (values ^ _shift(values, 30)) * _signed(_MIX_1)
    values = (values ^ _shift(values, 27)) * _signed(_MIX_2)
    return values ^ _shift(values, 31)


def _shift(values: torch.Tensor, count: int) -> torch.Tensor:
    """Shift right without dragging the sign along."""
    return (values >> count) & ((1 << (64 - count)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
