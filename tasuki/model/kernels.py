"""What a model computes besides its matrix products, behind one interface with three
implementations: compiled kernels (`native_kernels`), plain torch (`torch_kernels`), and torch's own
attention on a GPU (`cuda_kernels`).

All keep tensors in the model's dtype. The first two compute in float32 and give every row bits that
do not depend on the rows beside it; any two may differ from each other in the last ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tasuki.kv.cache import KVCache
from tasuki.model.batch import Batch


@dataclass(frozen=True)
class HeadWeights:
    """What some families do to heads before attention; float32, None where they do not."""

    qkv_bias: torch.Tensor | None = None  # [(heads + 2 * kv heads) * head_dim]
    q_norm: torch.Tensor | None = None  # [head_dim]
    k_norm: torch.Tensor | None = None


class AttentionStep(Protocol):
    """One step's attention; what all layers share is prepared once."""

    def attend(self, layer: int, qkv: torch.Tensor, weights: HeadWeights) -> torch.Tensor:
        """Write K and V of [T, (H + 2K) * d] into the cache, return attention's [T, H * d]."""


class Kernels(Protocol):
    """Tensors of rows are [T, n], contiguous; weights of norms are float32 [n]."""

    @property
    def kind(self) -> str:
        """What computes, for people and for `numerics`."""

    @property
    def keys_transposed(self) -> bool:
        """How K lies in the blocks of the KV cache."""

    def norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        """RMSNorm."""

    def add_norm(
        self, x_TD: torch.Tensor, delta_TD: torch.Tensor, weight_D: torch.Tensor
    ) -> torch.Tensor:
        """RMSNorm of x + delta, which is left in x."""

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of [T, 2 * n], the gate first -> [T, n]."""

    def begin(self, batch: Batch, kv: KVCache) -> AttentionStep:
        """`batch` lies in host memory, `kv` on the model's device."""
