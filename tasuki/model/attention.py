"""Paged attention in plain torch whose result for a row does not depend on what runs beside it.

Knows the layout of the KV cache; knows nothing about weights or requests. Exact by construction:
* keys are taken in tiles of 64 absolute positions, and every product has a tile's shape: a row of q
  times a tile of keys, a row of 64 probabilities times a tile of values. What varies is only how
  many rows there are, and they are padded to a multiple of `row_unit`, found by trying
  (`tasuki.model.row_unit`);
* a row's maximum has no order; a probability is 2 ** (score - maximum), a masked one exactly 0;
* the tiles' sums are added as in `tasuki.model.tree`.
Queries arrive scaled by log2(e) / sqrt(head_dim): 2 ** x costs a fifth of e ** x here.

Entries with one token are computed together (`decode`), longer ones one by one (`chunk`).
"""

from __future__ import annotations

from tasuki.kv.layout import KVLayout
from tasuki.model.chunk_attention import ChunkAttention
from tasuki.model.decode_attention import DecodeAttention
from tasuki.model.plan import ChunkPlan, DecodePlan
from tasuki.model.row_unit import UNITS, probe


class BlockAttention:
    """Attention for one model and one KV layout. `kind` tells how, and whether it is exact here."""

    def __init__(self, num_heads: int, layout: KVLayout) -> None:
        self.layout = layout
        self.group = num_heads // layout.num_kv_heads  # query heads of one KV head
        unit = probe(layout.head_dim)
        self.row_unit = unit or UNITS[-1]
        self.kind = f"torch-tiles-{self.row_unit}" + ("" if unit else "-inexact")

    def decode(self, plan: DecodePlan) -> DecodeAttention:
        """Attention of one step's entries with one token, for all layers."""
        return DecodeAttention(plan, self.layout, self.group, self.row_unit)

    def chunk(self, plan: ChunkPlan) -> ChunkAttention:
        """Attention of one step's entry with several tokens, for all layers."""
        return ChunkAttention(plan, self.layout, self.group, self.row_unit)
