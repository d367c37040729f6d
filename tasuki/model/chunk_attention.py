"""Attention of one entry with several tokens: see `tasuki.model.attention` for why it is exact.

The chunk is cut into pieces of consecutive tokens, so that a piece skips the tiles that none of its
tokens may see, and its scores stay small.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tasuki.kv.layout import KVLayout
from tasuki.model.config import KEY_TILE
from tasuki.model.elementwise import exp2_
from tasuki.model.plan import ChunkPlan, tiles_for
from tasuki.model.tree import add_in_order

PIECE_ROWS = 192  # query rows per KV head


@dataclass(frozen=True)
class Piece:
    """Tokens [first, last) of a chunk and the tiles they see."""

    first: int
    last: int
    tiles: int
    first_masked_tile: int
    mask: torch.Tensor  # float32 [masked tiles, 1, tokens, 1, 64]: 0, or -inf for what comes later


class ChunkAttention:
    """n tokens, K KV heads, G query heads each; a KV head's rows are n * G, token by token."""

    def __init__(self, plan: ChunkPlan, layout: KVLayout, group: int, row_unit: int) -> None:
        self._plan = plan
        self._layout = layout
        self._group = group
        self._row_unit = row_unit
        step = max(row_unit, PIECE_ROWS // group // row_unit * row_unit)
        self._pieces = [
            _piece(plan.start, first, min(first + step, plan.count))
            for first in range(0, plan.count, step)
        ]
        # Padding rows stay zero.
        self._q = torch.zeros(layout.num_kv_heads, self._padded(plan.count), layout.head_dim)
        real = self._q[:, : plan.count * group]
        self._q_real = real.view(layout.num_kv_heads, plan.count, group, layout.head_dim)

    def _padded(self, tokens: int) -> int:
        return -(-tokens * self._group // self._row_unit) * self._row_unit

    def __call__(self, q: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        """One layer. q: [n, K, G, head_dim]; rows: the layer's view of the cache; out: like q,
        written.

        `rows` is [*, block_size * head_dim]: the plan's indices count from the layer's first row.
        """
        plan, layout = self._plan, self._layout
        shape = (2, plan.tiles, layout.num_kv_heads, KEY_TILE, layout.head_dim)
        keys, values = rows.index_select(0, plan.rows).float().view(shape).unbind(0)
        keys = keys.transpose(2, 3)
        self._q_real.copy_(q.transpose(0, 1))
        for piece in self._pieces:
            tokens = piece.last - piece.first
            mixed = self._mix(piece, keys, values)[:, : tokens * self._group]
            source = mixed.view(layout.num_kv_heads, tokens, self._group, layout.head_dim)
            out[piece.first : piece.last].copy_(source.transpose(0, 1))

    def _mix(self, piece: Piece, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """keys: [tiles, K, dim, 64]; values: [tiles, K, 64, dim] -> [K, rows, dim]."""
        kv_heads, group = self._layout.num_kv_heads, self._group
        q = self._q[:, piece.first * group : self._padded(piece.last)]
        scores = q.new_empty(piece.tiles, kv_heads, q.shape[1], KEY_TILE)
        for tile in range(piece.tiles):
            torch.bmm(q, keys[tile], out=scores[tile])
        tokens = piece.last - piece.first
        # Padding rows see everything; nobody reads them.
        masked = scores[piece.first_masked_tile :, :, : tokens * group]
        masked.view(-1, kv_heads, tokens, group, KEY_TILE).add_(piece.mask)
        exp2_(scores.sub_(scores.amax(-1).amax(0)[None, :, :, None]))
        total = add_in_order(scores.sum(-1).unbind(0))
        mixed = add_in_order(torch.bmm(scores[tile], values[tile]) for tile in range(piece.tiles))
        return mixed.div_(total[:, :, None])


def _piece(start: int, first: int, last: int) -> Piece:
    tiles = tiles_for(start + last)
    first_masked_tile = (start + first) // KEY_TILE
    keys = torch.arange(first_masked_tile * KEY_TILE, tiles * KEY_TILE)
    queries = torch.arange(start + first, start + last)
    beyond = keys[None, :] > queries[:, None]
    mask = torch.zeros(beyond.shape).masked_fill_(beyond, -torch.inf)
    mask = mask.view(last - first, -1, KEY_TILE).transpose(0, 1)[:, None, :, None, :]
    return Piece(first, last, tiles, first_masked_tile, mask.contiguous())
