"""Paged attention against a plain softmax, and the tree in which it adds."""

from __future__ import annotations

import math

import pytest
import torch

from tasuki.kv.layout import KVLayout
from tasuki.model.attention import BlockAttention
from tasuki.model.plan import ChunkPlan, DecodePlan
from tasuki.model.tree import add_in_order, fold

HEADS, LAYOUT = 6, KVLayout(num_layers=2, num_kv_heads=2, head_dim=20, block_size=16)
LAYER = 1


@pytest.fixture
def cache() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(40, 2, 2, 2, 16, 20, generator=generator)


def rows_of(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(-1, 16 * 20)[LAYER * 4 :]


def plain(cache: torch.Tensor, q: torch.Tensor, table: list[int], length: int) -> torch.Tensor:
    """Softmax over `length` keys for one query [heads, head_dim], in double precision."""
    blocks = cache[table, LAYER].double()  # [blocks, 2, kv heads, 16, dim]
    keys, values = blocks.permute(1, 2, 0, 3, 4).reshape(2, 2, -1, 20)[:, :, :length]
    keys, values = (x.repeat_interleave(HEADS // 2, 0) for x in (keys, values))
    scores = torch.einsum("hd,hkd->hk", q.double(), keys) * math.log(2)
    return torch.einsum("hk,hkd->hd", scores.softmax(-1), values).float()


def test_decode(cache: torch.Tensor) -> None:
    lengths = [1, 64, 65, 17, 200]
    tables = [list(range(i, 40, 3)) for i in range(3)] + [[9, 4], list(range(39, 20, -1))]
    q = torch.randn(5, 2, HEADS // 2, 20)
    out = torch.empty_like(q)
    attention = BlockAttention(HEADS, LAYOUT)
    attention.decode(DecodePlan.build(lengths, tables, LAYOUT))(q, rows_of(cache), out)
    for i, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        expected = plain(cache, q[i].reshape(HEADS, 20), table, length)
        assert torch.allclose(out[i].reshape(HEADS, 20), expected, atol=1e-5)


@pytest.mark.parametrize(("start", "count"), [(0, 2), (0, 200), (63, 2), (70, 130), (128, 64)])
def test_chunk(cache: torch.Tensor, start: int, count: int) -> None:
    table = list(range(30, 4, -2))
    q = torch.randn(count, 2, HEADS // 2, 20)
    out = torch.empty_like(q)
    attention = BlockAttention(HEADS, LAYOUT)
    attention.chunk(ChunkPlan.build(0, count, start, table, LAYOUT))(q, rows_of(cache), out)
    for i in range(count):
        expected = plain(cache, q[i].reshape(HEADS, 20), table, start + i + 1)
        assert torch.allclose(out[i].reshape(HEADS, 20), expected, atol=1e-5)


@pytest.mark.parametrize("count", range(1, 18))
def test_both_ways_of_adding_are_the_same_tree(count: int) -> None:
    parts = torch.randn(3, count, 7)
    for size in (32, 64):  # however many zeros stand in at the end
        padded = torch.zeros(3, size, 7)
        padded[:, :count] = parts
        one_by_one = add_in_order(part.clone() for part in parts.unbind(1))
        assert torch.equal(fold(padded), one_by_one)
