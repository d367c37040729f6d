"""One step's tokens, packed: what every row is, where its KV goes, and what its attention reads.

Knows nothing about requests, weights or numbers of the model beyond the KV layout. Built once per
step, used by every layer: indices are those of layer 0, and a layer shifts its view of the cache
instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tasuki.kv.layout import KVLayout
from tasuki.model.linear import MIN_ROWS
from tasuki.model.plan import ChunkPlan, DecodePlan, cache_row


@dataclass(frozen=True)
class BatchEntry:
    """Some consecutive tokens of one request.

    `start` is the position of the first one: how many the KV cache holds already. `block_ids` is
    the request's block table, and covers `start + len(token_ids)` positions. The logits of the last
    `logits` tokens are wanted: none, one to choose a token by, or more for the prompt's logprobs.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    logits: int


@dataclass(frozen=True)
class Batch:
    """The rows of a step. Entries of one token come first, then the longer ones, then padding.

    T is the number of rows, at least MIN_ROWS; R of them are real, the rest is padding that is
    written nowhere.
    """

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    slots: (
        torch.Tensor
    )  # int64 [R, 2 * kv heads]: rows of head_dim elements in layer 0 of the cache
    fresh_block_ids: tuple[int, ...]  # blocks whose first position is written now
    decode: DecodePlan | None
    chunks: tuple[ChunkPlan, ...]
    sample_rows: torch.Tensor  # int64, S rows whose logits are wanted in order of entries; padded
    num_samples: int  # S

    @classmethod
    def build(cls, entries: Sequence[BatchEntry], layout: KVLayout) -> Batch:
        """Pack entries in any order. None may be empty, and each needs blocks for its tokens."""
        assert entries, "a step computes something"
        order = sorted(range(len(entries)), key=lambda i: len(entries[i].token_ids) > 1)
        token_ids: list[int] = []
        positions: list[int] = []
        block_ids: list[int] = []  # of every row's position
        chunks: list[ChunkPlan] = []
        last_row = [0] * len(entries)
        for index in order:
            entry, first_row, count = entries[index], len(token_ids), len(entries[index].token_ids)
            assert count, "an entry has tokens"
            span = range(entry.start, entry.start + count)
            assert len(entry.block_ids) >= layout.blocks_for(span.stop), "allocation goes first"
            token_ids += entry.token_ids
            positions += span
            block_ids += [entry.block_ids[position // layout.block_size] for position in span]
            last_row[index] = len(token_ids) - 1
            if count > 1:
                chunks.append(
                    ChunkPlan.build(first_row, count, entry.start, entry.block_ids, layout)
                )
        sample_rows = [
            row
            for last, entry in zip(last_row, entries, strict=True)
            for row in range(last + 1 - entry.logits, last + 1)
        ]
        return cls(
            token_ids=_padded(token_ids),
            positions=_padded(positions),
            slots=_slots(block_ids, positions, layout),
            fresh_block_ids=tuple(
                block_id
                for block_id, position in zip(block_ids, positions, strict=True)
                if position % layout.block_size == 0
            ),
            decode=_decode_plan([e for e in entries if len(e.token_ids) == 1], layout),
            chunks=tuple(chunks),
            sample_rows=_padded(sample_rows),
            num_samples=len(sample_rows),
        )


def _padded(values: list[int]) -> torch.Tensor:
    return torch.tensor(values + [0] * (MIN_ROWS - len(values)))


def _decode_plan(singles: Sequence[BatchEntry], layout: KVLayout) -> DecodePlan | None:
    if not singles:
        return None
    lengths = [entry.start + 1 for entry in singles]
    return DecodePlan.build(lengths, [entry.block_ids for entry in singles], layout)


def _slots(block_ids: list[int], positions: list[int], layout: KVLayout) -> torch.Tensor:
    """Where each row's keys, then values, go: indices into the cache seen as rows of head_dim."""
    heads = torch.arange(2 * layout.num_kv_heads)
    rows = cache_row(torch.tensor(block_ids), layout)[:, None] + heads[None, :]
    offsets = torch.tensor(positions) % layout.block_size
    return rows * layout.block_size + offsets[:, None]
