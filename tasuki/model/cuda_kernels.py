"""Everything besides the matrix products for a GPU, in torch's own operators: attention is torch's
scaled_dot_product_attention over the gathered blocks of each request.

Runs on any device, which is how it is tested without a GPU. Not exact: torch chooses a kernel by
the shapes of a step, so a row's last bits depend on what runs beside it.

A step's plan is made in host memory, crosses to the device once, and serves every layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tasuki.kv.cache import KVCache
from tasuki.kv.layout import KVLayout
from tasuki.model.batch import Batch, BatchEntry
from tasuki.model.config import ModelConfig
from tasuki.model.kernels import HeadWeights
from tasuki.model.rotary import RotaryTable, rotate
from tasuki.model.torch_kernels import prepared_heads, rms_norm

SCALE = math.log(2)  # the rotary table scales queries for powers of two
GROUP_POSITIONS = 1 << 16  # gathered at a time for entries of one token: bounds the copy
MASK_ELEMENTS = 1 << 24  # of one piece of a chunk: bounds the mask


@dataclass(frozen=True)
class Part:
    """Rows of a step whose attention is one call: S entries with n tokens each, S or n is one."""

    rows: torch.Tensor  # int64 [S * n] of the step
    tables: torch.Tensor  # int64 [S, blocks]; an entry's first block stands in where it has fewer
    positions: int  # L, that are attended to; at most what the blocks hold
    mask: torch.Tensor  # bool [S, 1, n * G, L]: what a row may see
    shape: tuple[int, int]  # S, n


class CudaKernels:
    keys_transposed = False

    def __init__(self, config: ModelConfig, rotary: RotaryTable, device: torch.device) -> None:
        self.kind = f"{device.type}-sdpa"
        self._config = config
        self._rotary = rotary
        self._device = device

    def norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        return rms_norm(x_TD, weight_D, self._config.rms_norm_eps)

    def add_norm(
        self, x_TD: torch.Tensor, delta_TD: torch.Tensor, weight_D: torch.Tensor
    ) -> torch.Tensor:
        return self.norm(x_TD.add_(delta_TD), weight_D)

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, 1)
        return F.silu(gate).mul_(up)

    def begin(self, batch: Batch, kv: KVCache) -> CudaStep:
        return CudaStep(self._config, self._rotary, self._device, batch, kv)


class CudaStep:
    """Positions' factors, where KV goes, and the parts, all on the device."""

    def __init__(
        self,
        config: ModelConfig,
        rotary: RotaryTable,
        device: torch.device,
        batch: Batch,
        kv: KVCache,
    ) -> None:
        layout = kv.layout
        self._kv = kv
        self._eps = config.rms_norm_eps
        self._heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        self._group = config.num_heads // config.num_kv_heads
        self._cos, self._sin = rotary.factors(batch.positions.to(device))
        blocks, offsets = written(batch, layout)
        # Nothing that another request left is ever read: zero times NaN would be NaN.
        kv.tensor.index_fill_(0, blocks[offsets == 0].to(device), 0)
        self._blocks, self._offsets = blocks.to(device), offsets.to(device)
        self._parts = [on(part, device) for part in parts(batch, layout, self._group)]

    def attend(self, layer: int, qkv: torch.Tensor, weights: HeadWeights) -> torch.Tensor:
        num_heads, num_kv_heads, _ = self._heads
        heads = prepared_heads(qkv, weights, self._heads, self._eps)
        heads = rotate(heads, self._cos, self._sin).to(qkv.dtype)
        cache = self._kv.tensor[:, layer]  # [blocks, 2, K, block_size, d]
        new = heads[: self._blocks.shape[0], num_heads:]
        cache[self._blocks, :, :, self._offsets] = new.view(-1, 2, num_kv_heads, new.shape[-1])
        # Padding rows stay zero: they are written nowhere, and must be finite.
        out = torch.zeros_like(heads[:, :num_heads])
        for part in self._parts:
            out.index_copy_(0, part.rows, self._mix(part, heads, cache))
        return out.flatten(1)

    def _mix(self, part: Part, heads: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Attention of one part, [S * n, H, d].

        The G query heads of a KV head are rows beside each other, so that K and V are read once,
        and torch's kernels without support for grouped heads may be chosen.
        """
        num_heads, num_kv_heads, head_dim = self._heads
        entries, tokens = part.shape
        q = heads[:, :num_heads].index_select(0, part.rows)
        q = q.view(entries, tokens, num_kv_heads, self._group, head_dim)
        q = q.permute(0, 2, 1, 3, 4).flatten(2, 3)  # [S, K, n * G, d]
        found = cache[part.tables]  # [S, blocks, 2, K, block_size, d]
        found = found.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, : part.positions]
        mixed = F.scaled_dot_product_attention(
            q, found[0], found[1], attn_mask=part.mask, scale=SCALE
        )
        mixed = mixed.reshape(entries, num_kv_heads, tokens, self._group, head_dim)
        return mixed.transpose(1, 2).reshape(entries * tokens, num_heads, head_dim)


def on(part: Part, device: torch.device) -> Part:
    moved = (t.to(device) for t in (part.rows, part.tables, part.mask))
    rows, tables, mask = moved
    return Part(rows, tables, part.positions, mask, part.shape)


def written(batch: Batch, layout: KVLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Block and offset of every row that is no padding: two of int64 [rows]."""
    _, counts, _, places = batch.entries.unbind(1)
    places = places.repeat_interleave(counts)
    positions = batch.positions[: places.shape[0]]
    blocks = batch.blocks[places + positions // layout.block_size]
    return blocks, positions % layout.block_size


def parts(batch: Batch, layout: KVLayout, group: int) -> Iterator[Part]:
    """All rows that are no padding: first the entries of one token, then pieces of longer ones."""
    singles = [i for i, entry in enumerate(batch.rows) if len(entry.token_ids) == 1]
    # Sorted, those that share a copy are about as long as each other.
    singles.sort(key=lambda i: batch.rows[i].start, reverse=True)
    while singles:
        longest = batch.rows[singles[0]].start + 1
        count = max(1, GROUP_POSITIONS // longest)
        taken, singles = singles[:count], singles[count:]
        yield _together([batch.rows[i] for i in taken], taken, layout, group)
    first_row = 0
    for entry in batch.rows:
        if len(entry.token_ids) > 1:
            yield from _pieces(entry, first_row, layout, group)
        first_row += len(entry.token_ids)


def _together(entries: list[BatchEntry], rows: list[int], layout: KVLayout, group: int) -> Part:
    """Entries of one token, which are the first rows of a step: row i is entry i."""
    lengths = torch.tensor([entry.start + 1 for entry in entries])
    positions = max(entry.start + 1 for entry in entries)
    width = layout.blocks_for(positions)
    tables = []
    for entry in entries:
        own = list(entry.block_ids[: layout.blocks_for(entry.start + 1)])
        tables.append(own + own[:1] * (width - len(own)))
    visible = torch.arange(positions) < lengths[:, None]
    mask = visible[:, None, None, :].expand(-1, -1, group, -1).contiguous()
    return Part(torch.tensor(rows), torch.tensor(tables), positions, mask, (len(entries), 1))


def _pieces(entry: BatchEntry, first_row: int, layout: KVLayout, group: int) -> Iterator[Part]:
    count = len(entry.token_ids)
    step = max(1, MASK_ELEMENTS // (group * (entry.start + count)))
    for first in range(0, count, step):
        tokens = min(step, count - first)
        begin = entry.start + first
        positions = begin + tokens
        queries = torch.arange(begin, positions).repeat_interleave(group)
        yield Part(
            rows=torch.arange(first_row + first, first_row + first + tokens),
            tables=torch.tensor([entry.block_ids[: layout.blocks_for(positions)]]),
            positions=positions,
            mask=(torch.arange(positions) <= queries[:, None])[None, None],
            shape=(1, tokens),
        )
