"""One step's tokens, packed: what every row is, and in which blocks its request's KV is.

Knows nothing about requests, weights or numbers of the model beyond the KV layout. Built once per
step, used by every layer.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tasuki.kv.layout import KVLayout
from tasuki.model.linear import MIN_ROWS


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

    T is the number of rows, at least MIN_ROWS; padding rows are written nowhere.
    """

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    rows: tuple[BatchEntry, ...]  # in the order of their rows
    entries: torch.Tensor  # int64 [entries, 4]: first row, tokens, start, place in `blocks`
    blocks: torch.Tensor  # int64: the block tables of all entries, as far as they are needed
    sample_rows: torch.Tensor  # int64, S rows whose logits are wanted in order of entries; padded
    num_samples: int  # S

    @classmethod
    def build(cls, entries: Sequence[BatchEntry], layout: KVLayout) -> Batch:
        """Pack entries in any order. None may be empty, and each needs blocks for its tokens."""
        assert entries, "a step computes something"
        order = sorted(range(len(entries)), key=lambda i: len(entries[i].token_ids) > 1)
        token_ids, positions = array("q"), array("q")
        numbers, blocks = array("q"), array("q")
        last_row = [0] * len(entries)
        for index in order:
            entry = entries[index]
            first_row, count = len(token_ids), len(entry.token_ids)
            end = entry.start + count
            needed = layout.blocks_for(end)
            assert count, "an entry has tokens"
            assert len(entry.block_ids) >= needed, "allocation goes first"
            numbers.extend((first_row, count, entry.start, len(blocks)))
            token_ids.extend(entry.token_ids)
            positions.extend(range(entry.start, end))
            blocks.extend(entry.block_ids[:needed])
            last_row[index] = len(token_ids) - 1
        sample_rows = array("q")
        for last, entry in zip(last_row, entries, strict=True):
            sample_rows.extend(range(last + 1 - entry.logits, last + 1))
        num_samples = len(sample_rows)
        return cls(
            token_ids=_padded(token_ids),
            positions=_padded(positions),
            rows=tuple(entries[index] for index in order),
            entries=torch.frombuffer(numbers, dtype=torch.int64).view(-1, 4),
            blocks=torch.frombuffer(blocks, dtype=torch.int64),
            sample_rows=_padded(sample_rows),
            num_samples=num_samples,
        )


def _padded(values: array[int]) -> torch.Tensor:
    values.extend([0] * (MIN_ROWS - len(values)))
    return torch.frombuffer(values, dtype=torch.int64)
