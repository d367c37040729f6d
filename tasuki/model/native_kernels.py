"""The compiled kernels of `tasuki.native` as a model uses them. They must have been loaded."""

from __future__ import annotations

import torch

from tasuki.kv.cache import KVCache
from tasuki.model.batch import Batch
from tasuki.model.config import ModelConfig
from tasuki.model.kernels import HeadWeights
from tasuki.model.rotary import RotaryTable


class NativeKernels:
    keys_transposed = True

    def __init__(self, config: ModelConfig, rotary: RotaryTable) -> None:
        self.kind = f"native-{torch.ops.tasuki.instructions()}"
        self._eps = config.rms_norm_eps
        self._num_heads = config.num_heads
        self._rotary = rotary

    def norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.tasuki.rms_norm(x_TD, weight_D, self._eps)
        return y

    def add_norm(
        self, x_TD: torch.Tensor, delta_TD: torch.Tensor, weight_D: torch.Tensor
    ) -> torch.Tensor:
        y: torch.Tensor = torch.ops.tasuki.add_rms_norm(x_TD, delta_TD, weight_D, self._eps)
        return y

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.tasuki.silu_product(gate_up)
        return y

    def begin(self, batch: Batch, kv: KVCache) -> NativeStep:
        return NativeStep(batch, kv, self._rotary, self._eps, self._num_heads)


class NativeStep:
    """No block is cleared first: a row reads the positions up to its own, and nothing else."""

    def __init__(
        self, batch: Batch, kv: KVCache, rotary: RotaryTable, eps: float, num_heads: int
    ) -> None:
        self._entries, self._blocks = batch.entries, batch.blocks
        self._cache = kv.tensor.flatten(4)
        self._cos, self._sin = rotary.cos, rotary.sin
        self._eps, self._num_heads = eps, num_heads

    def attend(self, layer: int, qkv: torch.Tensor, weights: HeadWeights) -> torch.Tensor:
        y: torch.Tensor = torch.ops.tasuki.attention(
            qkv,
            weights.qkv_bias,
            weights.q_norm,
            weights.k_norm,
            self._eps,
            self._cos,
            self._sin,
            self._entries,
            self._blocks,
            self._cache,
            layer,
            self._num_heads,
        )
        return y
