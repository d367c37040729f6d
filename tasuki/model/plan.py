"""Which parts of the KV cache the rows of a step attend to, as index tensors.

Keys are read in tiles of 64 absolute positions. The cache is seen as rows of block_size * head_dim
elements: one row holds one block's keys, or values, of one layer and one head. All row numbers are
those of layer 0; K rows of head h come first, V rows follow `num_kv_heads` later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tasuki.kv.layout import KVLayout
from tasuki.model.config import KEY_TILE


def cache_row(block_ids: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """Row of a block's first key head in layer 0."""
    return block_ids * (layout.num_layers * 2 * layout.num_kv_heads)


def tiles_for(length: int) -> int:
    """Tiles that hold `length` positions."""
    return -(-length // KEY_TILE)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _tile_rows(block_ids: Sequence[int], length: int, layout: KVLayout) -> torch.Tensor:
    """Cache rows of the keys of `length` positions in whole tiles: int64 [tiles, kv heads, blocks
    per tile].

    Blocks that would lie beyond are masked, but zero times NaN is NaN: they are never read, whether
    another request left them or this one has yet to write them. Its first block stands in.
    """
    tiles, per_tile = tiles_for(length), KEY_TILE // layout.block_size
    used = list(block_ids[: layout.blocks_for(length)])
    used += [block_ids[0]] * (tiles * per_tile - len(used))
    rows = cache_row(torch.tensor(used), layout).view(tiles, 1, per_tile)
    return rows + torch.arange(layout.num_kv_heads).view(1, -1, 1)


@dataclass(frozen=True)
class DecodePlan:
    """Attention of all entries with one token. An item is one tile of one entry.

    S entries, W items, P = the largest number of tiles of an entry, rounded up to a power of two.
    """

    count: int  # S
    key_rows: torch.Tensor  # int64 [W, kv heads * blocks per tile]
    value_rows: torch.Tensor  # the same for values
    entry_of_item: torch.Tensor  # int64 [W]
    mask: torch.Tensor  # float32 [W, 1, 64]: 0, or -inf beyond the entry's length
    parts: torch.Tensor  # int64 [S * P]: items of each entry in order; W stands for "none"
    parts_per_entry: int  # P
    full: bool  # every entry has P tiles, so that `parts` changes nothing

    @classmethod
    def build(
        cls, lengths: Sequence[int], tables: Sequence[Sequence[int]], layout: KVLayout
    ) -> DecodePlan:
        """`lengths` are positions to attend to, the token's own included."""
        tiles = [tiles_for(length) for length in lengths]
        num_items = sum(tiles)
        per_entry = power_of_two(max(tiles))
        rows = torch.cat(
            [_tile_rows(table, n, layout) for table, n in zip(tables, lengths, strict=True)]
        ).view(num_items, -1)
        parts: list[int] = []
        item = 0
        for n in tiles:
            parts += [*range(item, item + n), *[num_items] * (per_entry - n)]
            item += n
        positions = torch.cat([torch.arange(n) for n in tiles])[:, None] * KEY_TILE
        positions = positions + torch.arange(KEY_TILE)
        entry_of_item = torch.repeat_interleave(torch.tensor(tiles))
        beyond = positions >= torch.tensor(lengths)[entry_of_item][:, None]
        return cls(
            count=len(lengths),
            key_rows=rows,
            value_rows=rows + layout.num_kv_heads,
            entry_of_item=entry_of_item,
            mask=torch.zeros(num_items, KEY_TILE).masked_fill_(beyond, -torch.inf)[:, None, :],
            parts=torch.tensor(parts),
            parts_per_entry=per_entry,
            full=num_items == len(tiles) * per_entry,
        )


@dataclass(frozen=True)
class ChunkPlan:
    """Attention of one entry with several tokens."""

    first_row: int  # of the step
    count: int  # tokens
    start: int  # position of the first one
    tiles: int
    rows: (
        torch.Tensor
    )  # int64 [2 * tiles * kv heads * blocks per tile]: keys of all tiles, then values

    @classmethod
    def build(
        cls, first_row: int, count: int, start: int, block_ids: Sequence[int], layout: KVLayout
    ) -> ChunkPlan:
        """`count` tokens from position `start`, in the step's rows from `first_row` on."""
        tiles = tiles_for(start + count)
        keys = _tile_rows(block_ids, start + count, layout).flatten()
        rows = torch.cat([keys, keys + layout.num_kv_heads])
        return cls(first_row, count, start, tiles, rows)


class Tokens(Protocol):
    """What a plan asks of a batch's entry."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def start(self) -> int: ...
    @property
    def block_ids(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class StepPlan:
    """All rows of a step: where their KV goes, and what their attention reads."""

    slots: torch.Tensor  # int64 [rows, 2 * kv heads]: rows of head_dim elements in layer 0
    fresh_block_ids: tuple[int, ...]  # blocks whose first position is written now
    decode: DecodePlan | None
    chunks: tuple[ChunkPlan, ...]

    @classmethod
    def build(cls, entries: Sequence[Tokens], layout: KVLayout) -> StepPlan:
        """`entries` in the order of their rows, those of one token first."""
        block_ids: list[int] = []  # of every row's position
        positions: list[int] = []
        chunks: list[ChunkPlan] = []
        singles: list[Tokens] = []
        for entry in entries:
            first_row, count = len(positions), len(entry.token_ids)
            span = range(entry.start, entry.start + count)
            positions += span
            block_ids += [entry.block_ids[position // layout.block_size] for position in span]
            if count > 1:
                chunks.append(
                    ChunkPlan.build(first_row, count, entry.start, entry.block_ids, layout)
                )
            else:
                singles.append(entry)
        fresh = (
            block_id
            for block_id, position in zip(block_ids, positions, strict=True)
            if position % layout.block_size == 0
        )
        decode = None
        if singles:
            lengths = [entry.start + 1 for entry in singles]
            decode = DecodePlan.build(lengths, [entry.block_ids for entry in singles], layout)
        return cls(_slots(block_ids, positions, layout), tuple(fresh), decode, tuple(chunks))


def _slots(block_ids: list[int], positions: list[int], layout: KVLayout) -> torch.Tensor:
    """Where each row's keys, then values, go: indices into the cache seen as rows of head_dim."""
    heads = torch.arange(2 * layout.num_kv_heads)
    rows = cache_row(torch.tensor(block_ids), layout)[:, None] + heads[None, :]
    offsets = torch.tensor(positions) % layout.block_size
    return rows * layout.block_size + offsets[:, None]
