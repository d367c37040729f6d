"""Chooses one token per row of logits. Knows nothing about requests beyond their sampling
parameters.

Temperature sampling is Gumbel-max: the token with the largest logit / temperature + noise, where
the noise is a hash of (seed, sample index, position, token id) alone. The same request therefore
gets the same tokens on any worker, in any batch, after any retry.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tasuki.errors import TasukiError
from tasuki.messages import SamplingParams

SAMPLE_INDEX = 0  # which of a request's parallel samples; one so far
_MASK = (1 << 64) - 1
# Constants of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
# 2014).
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_RUN = 1024  # noise is computed in whole runs, so that a vocabulary's end rounds like its middle


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int]:
    """One token id per row of float32 [n, vocab_size].

    `positions` are those of the tokens to be chosen. Equal logits: the lowest id wins. Raises
    TasukiError naming the row when its logits are not finite.
    """
    assert logits.shape[0] == len(params) == len(positions), "one row per request"
    return [
        _choose(row, logits[row], params[row], positions[row]) for row in range(logits.shape[0])
    ]


def _choose(number: int, row: torch.Tensor, params: SamplingParams, position: int) -> int:
    best = row.max()
    # NaN and +inf show in the maximum; -inf only in the minimum.
    if not torch.isfinite(best) or not torch.isfinite(row.min()):
        raise TasukiError(
            f"logits of row {number} (position {position}) are not finite; the weights or the KV "
            "cache of this worker are damaged",
            reason="logits",
        )
    if params.temperature <= 0:
        return int(row.argmax())
    # In double precision and relative to the best one, no temperature can overflow.
    scores = (row.double() - best.double()) / params.temperature
    return int((scores + gumbel(params.seed, position, row.shape[0])).argmax())


def gumbel(seed: int, position: int, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise for token ids 0 .. vocab_size - 1, float64."""
    key = seed & _MASK
    for word in (SAMPLE_INDEX, position):
        key = _mix((key + _GAMMA * (word + 1)) & _MASK)
    count = -(-vocab_size // _RUN) * _RUN
    counters = torch.arange(1, count + 1, dtype=torch.int64)
    bits = _mix_tensor(counters * _signed(_GAMMA) + _signed(key))
    # 53 bits, in the middle of their interval: never 0 and never 1.
    uniform = (_shift(bits, 11).double() + 0.5) * 2.0**-53
    return uniform.log_().neg_().log_().neg_()[:vocab_size]


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
