"""A Llama-family causal language model over a paged KV cache.

Knows nothing about requests, scheduling or sampling. Shapes: T rows of a step, D hidden size, H
query heads, K key/value heads, d head_dim. Every operation treats rows independently and none is
given a single row, so that a row's logits do not depend on the batch, the chunk or the number of
threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tasuki.errors import ModelError
from tasuki.kv.cache import KVCache
from tasuki.kv.layout import KVLayout
from tasuki.model.attention import BlockAttention
from tasuki.model.batch import Batch
from tasuki.model.checkpoint import Checkpoint
from tasuki.model.chunk_attention import ChunkAttention
from tasuki.model.config import ModelConfig
from tasuki.model.decode_attention import DecodeAttention
from tasuki.model.elementwise import silu_product
from tasuki.model.linear import Linear, probe
from tasuki.model.rotary import RotaryTable, rotate
from tasuki.model.weights import LayerTensors, ModelWeights


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, ready to compute with."""

    attention_norm: torch.Tensor
    qkv: Linear
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    @classmethod
    def pack(cls, tensors: LayerTensors, kind: str) -> Layer:
        return cls(
            attention_norm=tensors.attention_norm,
            qkv=Linear(tensors.qkv, kind=kind),
            output=Linear(tensors.output, kind=kind),
            mlp_norm=tensors.mlp_norm,
            gate_up=Linear(tensors.gate_up, kind=kind),
            down=Linear(tensors.down, kind=kind),
        )


class CausalLM:
    """One loaded model. Not thread-safe: one step at a time."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self._linear_kind = probe()
        self._embedding = weights.embedding()
        self._layers = [Layer.pack(tensors, self._linear_kind) for tensors in weights.layers()]
        self._final_norm = weights.final_norm()
        head = weights.head()
        head = self._embedding if head is None else head
        self._head = Linear(head, kind=self._linear_kind, rows_hint=16)
        self._rotary = RotaryTable(config)
        self._attention = BlockAttention(config.num_heads, config.kv_layout(16))

    @classmethod
    @torch.inference_mode()
    def load(cls, directory: Path, *, dtype: str = "float32") -> CausalLM:
        """Read a model directory. Raises ModelError for what is missing, damaged, unsupported."""
        if dtype != "float32":
            raise ModelError(f"dtype {dtype!r} is not supported; expected 'float32'")
        config = ModelConfig.from_directory(directory)
        with Checkpoint(directory) as checkpoint:
            return cls(config, ModelWeights(config, checkpoint))

    def layout(self, block_size: int) -> KVLayout:
        """The shape of this model's KV. Raises ConfigError for an impossible block size."""
        return self.config.kv_layout(block_size)

    def facts(self) -> dict[str, str]:
        """What computes here, for people."""
        return {"linears": self._linear_kind, "attention": self._attention.kind, "dtype": "float32"}

    def numerics(self) -> str:
        """Workers with the same one give the same bits."""
        capability = torch.backends.cpu.get_cpu_capability()
        return f"cpu/{capability}/float32/{self._linear_kind}/{self._attention.kind}"

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVCache) -> torch.Tensor:
        """Compute a step: writes KV of its tokens, returns float32 [rows whose logits are wanted,
        vocab_size], in the order of entries.

        The blocks that the batch names belong to the caller, and nothing else is written.
        """
        attention = self._attention_for(kv.layout)
        for block_id in batch.fresh_block_ids:
            kv.tensor[block_id].zero_()  # nothing that another request left is ever read
        step = _Step(attention, batch, kv, self._rotary)
        x_TD = self._embedding.index_select(0, batch.token_ids)
        for number, layer in enumerate(self._layers):
            self._layer(number, layer, x_TD, step)
        if not batch.num_samples:
            return x_TD.new_empty(0, self.config.vocab_size)
        wanted = self._norm(x_TD.index_select(0, batch.sample_rows), self._final_norm)
        return self._head(wanted)[: batch.num_samples]

    def _layer(self, number: int, layer: Layer, x_TD: torch.Tensor, step: _Step) -> None:
        """Add one layer's attention and MLP to `x_TD`, in place."""
        qkv = layer.qkv(self._norm(x_TD, layer.attention_norm))
        x_TD.add_(layer.output(step.attend(number, qkv)))
        gate_up = layer.gate_up(self._norm(x_TD, layer.mlp_norm))
        x_TD.add_(layer.down(silu_product(gate_up)))

    def _norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        mean_square = x_TD.square().mean(-1, keepdim=True)
        return (x_TD * mean_square.add_(self.config.rms_norm_eps).rsqrt_()).mul_(weight_D)

    def _attention_for(self, layout: KVLayout) -> BlockAttention:
        if layout != self._attention.layout:
            self._attention = BlockAttention(self.config.num_heads, layout)
        return self._attention


class _Step:
    """What all layers of one step share: positions' factors, views of the cache, buffers."""

    def __init__(
        self, attention: BlockAttention, batch: Batch, kv: KVCache, rotary: RotaryTable
    ) -> None:
        layout, group = kv.layout, attention.group
        rows = batch.token_ids.shape[0]
        self._head_dim = layout.head_dim
        self._num_heads = layout.num_kv_heads * group
        self._by_kv_head = (rows, layout.num_kv_heads, group, layout.head_dim)
        self._cos, self._sin = rotary.factors(batch.positions)
        self._slots = batch.slots
        self._cache_rows = kv.tensor.view(-1, layout.block_size * layout.head_dim)
        self._cache_slots = kv.tensor.view(-1, layout.head_dim)
        self._rows_per_layer = 2 * layout.num_kv_heads
        self._slots_per_layer = self._rows_per_layer * layout.block_size
        # Padding rows are never written; they must hold something finite.
        self._out = torch.zeros(rows, self._num_heads * layout.head_dim)
        self._parts: list[tuple[slice, DecodeAttention | ChunkAttention]] = []
        if batch.decode is not None:
            self._parts.append((slice(batch.decode.count), attention.decode(batch.decode)))
        for plan in batch.chunks:
            mine = slice(plan.first_row, plan.first_row + plan.count)
            self._parts.append((mine, attention.chunk(plan)))

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Write K and V of [T, (H + 2K) * d] into the cache and return attention's [T, H * d]."""
        heads = rotate(qkv.view(qkv.shape[0], -1, self._head_dim), self._cos, self._sin)
        # A layer's own view of the cache: the batch's indices, made for layer 0, then fit every
        # layer.
        slots = self._cache_slots[layer * self._slots_per_layer :]
        slots[self._slots] = heads[: self._slots.shape[0], self._num_heads :]
        rows = self._cache_rows[layer * self._rows_per_layer :]
        q = heads[:, : self._num_heads].view(self._by_kv_head)
        out = self._out.view(self._by_kv_head)
        for mine, attention in self._parts:
            attention(q[mine], rows, out[mine])
        return self._out
