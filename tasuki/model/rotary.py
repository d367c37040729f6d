"""Rotary positions from tables, for all heads of a step at once. Knows nothing about attention.

The rotate-half form of the Llama family: with a head's halves (a, b) and an angle per dimension,
a' = a cos - b sin and b' = b cos + a sin.
"""

from __future__ import annotations

import math

import torch

from tasuki.model.config import ModelConfig
from tasuki.model.device import CPU
from tasuki.model.rope import Rope

LEAST_POSITIONS = 128  # what the trials at start take, however short the requests will be


class RotaryTable:
    """Factors by position. Queries are scaled by log2(e) / sqrt(head_dim) on the way, as attention
    asks.
    """

    def __init__(
        self, config: ModelConfig, positions: int | None = None, device: torch.device = CPU
    ) -> None:
        """For the first `positions` of the model's, and not for fewer than LEAST_POSITIONS."""
        self._config = config
        count = config.max_position
        if positions is not None:
            count = min(count, max(positions, LEAST_POSITIONS))
        dim = config.head_dim
        frequencies = inverse_frequencies(config.rope, dim)
        angles = torch.outer(torch.arange(count).float(), frequencies)
        # [count, head_dim / 2]; computed on a CPU, so that they are the same bits everywhere
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)
        self._device = device
        self._scale = math.log2(math.e) / math.sqrt(dim)

    def factors(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two tensors [T, heads + 2 * kv heads, head_dim] for the rows of a step.

        Value heads get 1 and 0, so that one product serves the whole merged q, k, v.
        """
        config = self._config
        queries, keys = config.num_heads, config.num_heads + config.num_kv_heads
        shape = (positions.shape[0], keys + config.num_kv_heads, config.head_dim)
        cos = torch.ones(shape, device=self._device)
        sin = torch.zeros(shape, device=self._device)
        own_cos, own_sin = (t.index_select(0, positions) for t in (self.cos, self.sin))
        cos[:, :keys] = torch.cat([own_cos, own_cos], -1)[:, None, :]
        # the halves change places before it multiplies
        sin[:, :keys] = torch.cat([-own_sin, own_sin], -1)[:, None, :]
        cos[:, :queries] *= self._scale
        sin[:, :queries] *= self._scale
        return cos, sin


def inverse_frequencies(rope: Rope, dim: int) -> torch.Tensor:
    """Radians per position for each pair of dimensions, float32 [dim / 2].

    `llama3` is the scaling published with Llama 3.1: a wave that turns fewer than `low_freq_factor`
    times within the original context is stretched, one that turns more than `high_freq_factor`
    times is not.
    """
    plain = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    if rope.kind == "default":
        return plain
    stretched = plain / rope.factor
    if rope.kind == "linear":
        return stretched
    wavelength = 2 * math.pi / plain
    turns = rope.original_max_position / wavelength
    low, high = rope.low_freq_factor, rope.high_freq_factor
    share = (turns - low) / (high - low)
    between = (1 - share) * stretched + share * plain
    scaled = torch.where(turns < low, stretched, plain)
    return torch.where((turns >= low) & (turns <= high), between, scaled)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [T, n, head_dim] by the factors of the same shape; returns a new tensor."""
    swapped = torch.roll(heads, heads.shape[-1] // 2, -1).mul_(sin)
    return (heads * cos).add_(swapped)
