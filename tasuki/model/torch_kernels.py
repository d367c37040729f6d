"""Everything besides the matrix products in plain torch: where there is no compiler.

Knows how the torch attention wants its queries and its view of the cache; `tasuki.model.attention`
says why all of it is exact.
"""

from __future__ import annotations

import torch

from tasuki.kv.cache import KVCache
from tasuki.kv.layout import KVLayout
from tasuki.model.attention import BlockAttention
from tasuki.model.batch import Batch
from tasuki.model.chunk_attention import ChunkAttention
from tasuki.model.config import ModelConfig
from tasuki.model.decode_attention import DecodeAttention
from tasuki.model.elementwise import silu_product
from tasuki.model.kernels import HeadWeights
from tasuki.model.plan import StepPlan
from tasuki.model.rotary import RotaryTable, rotate


class TorchKernels:
    keys_transposed = False

    def __init__(self, config: ModelConfig, rotary: RotaryTable) -> None:
        self._config = config
        self._rotary = rotary
        self._attention = BlockAttention(config.num_heads, config.kv_layout(16))

    @property
    def kind(self) -> str:
        return self._attention.kind

    def norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        return rms_norm(x_TD, weight_D, self._config.rms_norm_eps)

    def add_norm(
        self, x_TD: torch.Tensor, delta_TD: torch.Tensor, weight_D: torch.Tensor
    ) -> torch.Tensor:
        return self.norm(x_TD.add_(delta_TD), weight_D)

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_product(gate_up)

    def begin(self, batch: Batch, kv: KVCache) -> TorchStep:
        if kv.layout != self._attention.layout:
            self._attention = BlockAttention(self._config.num_heads, kv.layout)
        plan = StepPlan.build(batch.rows, kv.layout)
        for block_id in plan.fresh_block_ids:
            kv.tensor[block_id].zero_()  # nothing that another request left is ever read
        return TorchStep(self._attention, batch, plan, kv, self._rotary, self._config.rms_norm_eps)


class TorchStep:
    """Positions' factors, views of the cache, buffers."""

    def __init__(
        self,
        attention: BlockAttention,
        batch: Batch,
        plan: StepPlan,
        kv: KVCache,
        rotary: RotaryTable,
        eps: float,
    ) -> None:
        layout: KVLayout = kv.layout
        rows = batch.token_ids.shape[0]
        self._eps = eps
        self._num_heads = layout.num_kv_heads * attention.group
        self._heads = (self._num_heads, layout.num_kv_heads, layout.head_dim)
        self._by_kv_head = (rows, layout.num_kv_heads, attention.group, layout.head_dim)
        self._cos, self._sin = rotary.factors(batch.positions)
        self._slots = plan.slots
        self._cache_rows = kv.tensor.view(-1, layout.block_size * layout.head_dim)
        self._cache_slots = kv.tensor.view(-1, layout.head_dim)
        self._rows_per_layer = 2 * layout.num_kv_heads
        self._slots_per_layer = self._rows_per_layer * layout.block_size
        # Padding rows are never written; they must hold something finite.
        self._out = torch.zeros(rows, self._num_heads * layout.head_dim)
        self._parts: list[tuple[slice, DecodeAttention | ChunkAttention]] = []
        if plan.decode is not None:
            self._parts.append((slice(plan.decode.count), attention.decode(plan.decode)))
        for chunk in plan.chunks:
            mine = slice(chunk.first_row, chunk.first_row + chunk.count)
            self._parts.append((mine, attention.chunk(chunk)))

    def attend(self, layer: int, qkv: torch.Tensor, weights: HeadWeights) -> torch.Tensor:
        """A layer's own view of the cache begins at its first row: the plan's indices, made for
        layer 0, then fit every layer.
        """
        heads = prepared_heads(qkv, weights, self._heads, self._eps)
        heads = rotate(heads, self._cos, self._sin)
        slots = self._cache_slots[layer * self._slots_per_layer :]
        slots[self._slots] = heads[: self._slots.shape[0], self._num_heads :].to(slots.dtype)
        rows = self._cache_rows[layer * self._rows_per_layer :]
        q = heads[:, : self._num_heads].view(self._by_kv_head)
        out = self._out.view(self._by_kv_head)
        for mine, attention in self._parts:
            attention(q[mine], rows, out[mine])
        return self._out.to(qkv.dtype)


def prepared_heads(
    qkv: torch.Tensor, weights: HeadWeights, shape: tuple[int, int, int], eps: float
) -> torch.Tensor:
    """Bias added, q and k normalised: float32 [T, H + 2K, d]. `shape` is (H, K, d)."""
    num_heads, num_kv_heads, head_dim = shape
    if weights.qkv_bias is not None:
        qkv = qkv + weights.qkv_bias.to(qkv.dtype)
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    if weights.q_norm is not None and weights.k_norm is not None:
        q, k, v = heads.tensor_split((num_heads, num_heads + num_kv_heads), 1)
        q = rms_norm(q, weights.q_norm, eps)
        k = rms_norm(k, weights.k_norm, eps)
        heads = torch.cat([q, k, v], 1)
    return heads.float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension: float32 inside, rounded to x's type as the reference does."""
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight.to(x.dtype))
