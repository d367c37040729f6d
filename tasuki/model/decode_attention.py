"""Attention of all entries with one token in a step: see `tasuki.model.attention` for why it is
exact.

An item is one tile of one entry. All items' scores are computed, then each entry's maximum, then
all items' products with the values, then each entry's sums. Buffers are made once per step and used
by every layer; keys and values are gathered a slab of items at a time, so that they stay in the
core's cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tasuki.kv.layout import KVLayout
from tasuki.model.config import KEY_TILE
from tasuki.model.elementwise import exp2_
from tasuki.model.plan import DecodePlan
from tasuki.model.tree import fold

SLAB_BYTES = 1 << 20


@dataclass(frozen=True)
class Slab:
    """Some consecutive items: their indices and their parts of the buffers."""

    key_rows: torch.Tensor
    value_rows: torch.Tensor
    gathered: torch.Tensor  # [items * kv heads * blocks per tile, block_size * head_dim]
    keys: torch.Tensor  # `gathered` as [items * kv heads, head_dim, 64]
    values: torch.Tensor  # `gathered` as [items * kv heads, 64, head_dim]
    q: torch.Tensor  # [items * kv heads, rows, head_dim]
    scores: torch.Tensor  # [items * kv heads, rows, 64]
    products: torch.Tensor  # [items * kv heads, rows, head_dim]


class DecodeAttention:
    """S entries, W items, K KV heads, G query heads each, padded to `rows`."""

    def __init__(self, plan: DecodePlan, layout: KVLayout, group: int, row_unit: int) -> None:
        kv_heads, dim = layout.num_kv_heads, layout.head_dim
        items = plan.entry_of_item.shape[0]
        rows = -(-group // row_unit) * row_unit
        self._plan = plan
        self._group = group
        self._shape = (plan.count, kv_heads, rows, -1)
        self._q = torch.zeros(plan.count, kv_heads, rows, dim)
        self._q_real = self._q[:, :, :group]
        self._q_items = torch.empty(items, kv_heads, rows, dim)
        self._scores = torch.empty(items, kv_heads * rows, KEY_TILE)
        # One part more than items: it stands where an entry has fewer tiles than the longest.
        self._best = torch.full((items + 1, kv_heads * rows), -torch.inf)
        self._sums = torch.zeros(items + 1, kv_heads * rows)
        self._products = torch.zeros(items + 1, kv_heads * rows * dim)
        self._slabs = self._cut(layout, items, rows)

    def _cut(self, layout: KVLayout, items: int, rows: int) -> list[Slab]:
        kv_heads, dim = layout.num_kv_heads, layout.head_dim
        step = max(1, SLAB_BYTES // (kv_heads * KEY_TILE * dim * self._q.element_size()))
        row_elements = layout.block_size * dim
        buffer = torch.empty(min(step, items) * kv_heads * KEY_TILE * dim)

        def part(first: int) -> Slab:
            last = min(first + step, items)
            tiles = buffer[: (last - first) * kv_heads * KEY_TILE * dim]
            values = tiles.view(-1, KEY_TILE, dim)
            return Slab(
                key_rows=self._plan.key_rows[first:last].reshape(-1),
                value_rows=self._plan.value_rows[first:last].reshape(-1),
                gathered=tiles.view(-1, row_elements),
                keys=values.transpose(1, 2),
                values=values,
                q=self._q_items[first:last].view(-1, rows, dim),
                scores=self._scores[first:last].view(-1, rows, KEY_TILE),
                products=self._products[first:last].view(-1, rows, dim),
            )

        return [part(first) for first in range(0, items, step)]

    def __call__(self, q: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        """One layer. q: [S, K, G, head_dim]; rows: the layer's view of the cache; out: like q,
        written.

        `rows` is [*, block_size * head_dim]: the plan's indices count from the layer's first row.
        """
        entry_of_item = self._plan.entry_of_item
        self._q_real.copy_(q)
        torch.index_select(self._q, 0, entry_of_item, out=self._q_items)
        for slab in self._slabs:
            gather(rows, slab.key_rows, slab.gathered)
            torch.bmm(slab.q, slab.keys, out=slab.scores)
        scores = self._scores.add_(self._plan.mask)
        torch.amax(scores, -1, out=self._best[:-1])
        best = self._by_entry(self._best).amax(1)
        exp2_(scores.sub_(best.index_select(0, entry_of_item).unsqueeze_(-1)))
        torch.sum(scores, -1, out=self._sums[:-1])
        for slab in self._slabs:
            gather(rows, slab.value_rows, slab.gathered)
            torch.bmm(slab.scores, slab.values, out=slab.products)
        total = fold(self._by_entry(self._sums)).view(self._shape)
        mixed = fold(self._by_entry(self._products)).view(self._shape)
        torch.div(mixed[:, :, : self._group], total[:, :, : self._group], out=out)

    def _by_entry(self, parts: torch.Tensor) -> torch.Tensor:
        """[W + 1, n] -> [S, P, n]."""
        plan = self._plan
        if plan.full:
            return parts[:-1].view(plan.count, plan.parts_per_entry, -1)
        return parts.index_select(0, plan.parts).view(plan.count, plan.parts_per_entry, -1)


def gather(rows: torch.Tensor, numbers: torch.Tensor, out: torch.Tensor) -> None:
    """The rows of the cache with these numbers, as float32."""
    if rows.dtype is out.dtype:
        torch.index_select(rows, 0, numbers, out=out)
    else:
        out.copy_(rows.index_select(0, numbers))
