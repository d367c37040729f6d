"""The compiled kernels against plain torch, and against what they must refuse."""

from __future__ import annotations

import math
import os

import pytest
import torch
import torch.nn.functional as F

from tasuki.cache_root import cache_root
from tasuki.native import library

DTYPES = (torch.float32, torch.bfloat16)
# query heads, KV heads, head_dim, block size
SHAPES = [
    (9, 3, 64, 16), (4, 1, 24, 16), (5, 1, 26, 8), (8, 2, 32, 32), (3, 3, 64, 64), (6, 3, 128, 16),
    (6, 2, 64, 1), (14, 2, 80, 16), (16, 1, 16, 4),
]  # fmt: skip
POSITIONS = 300


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    assert library.load(cache_root(os.environ))


def tolerance(dtype: torch.dtype) -> float:
    return 2e-6 if dtype is torch.float32 else 2e-2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 16, 17, 64, 130, 576])
def test_norm(dtype: torch.dtype, width: int) -> None:
    x, delta = (torch.randn(7, width).to(dtype) for _ in range(2))
    weight = torch.rand(width).to(dtype).float()
    scale = x.float().square().mean(-1, keepdim=True).add(1e-5).rsqrt()
    expected = (x.float() * scale).to(dtype) * weight.to(dtype)
    found = torch.ops.tasuki.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(found, expected, rtol=tolerance(dtype), atol=1e-6)

    total = x + delta
    expected = torch.ops.tasuki.rms_norm(total, weight, 1e-5)
    found = torch.ops.tasuki.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(x, total)  # in place
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 149, 1536])
def test_silu_product(dtype: torch.dtype, width: int) -> None:
    gate_up = (torch.randn(5, 2 * width) * 8).to(dtype)
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 0] = 200.0, -200.0, 0.0
    expected = F.silu(gate_up[:, :width]) * gate_up[:, width:]
    found = torch.ops.tasuki.silu_product(gate_up)
    torch.testing.assert_close(found, expected, rtol=2 * tolerance(dtype), atol=1e-6)


class Case:
    """Some requests over one cache full of NaN, and what attention should give."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        self.heads, self.kv_heads, self.dim, self.block_size = shape
        self.dtype = dtype
        per_request = -(-POSITIONS // self.block_size)
        self.cache = torch.full(
            (3 * per_request, 2, 2, self.kv_heads, self.block_size * self.dim), torch.nan
        ).to(dtype)
        ids = torch.randperm(3 * per_request)
        self.tables = [ids[n * per_request :][:per_request].tolist() for n in range(3)]
        angles = torch.outer(torch.arange(POSITIONS).float(), torch.rand(self.dim // 2))
        self.cos, self.sin = angles.cos(), angles.sin()
        width = (self.heads + 2 * self.kv_heads) * self.dim
        self.qkv = [torch.randn(POSITIONS, width).to(dtype) for _ in range(3)]
        self.bias = 0.1 * torch.randn(width).to(dtype).float()
        self.norms = [1 + 0.1 * torch.randn(self.dim).to(dtype).float() for _ in range(2)]

    def attend(self, parts: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """(request, start, tokens), all in one step -> the rows of each."""
        qkv = torch.cat([self.qkv[n][start : start + count] for n, start, count in parts])
        entries: list[list[int]] = []
        blocks: list[int] = []
        row = 0
        for n, start, count in parts:
            entries.append([row, count, start, len(blocks)])
            blocks += self.tables[n]
            row += count
        out = torch.ops.tasuki.attention(
            qkv, self.bias, *self.norms, 1e-6, self.cos, self.sin,
            torch.tensor(entries), torch.tensor(blocks), self.cache, 1, self.heads,
        )  # fmt: skip
        return list(out.split([count for *_, count in parts]))

    def expected(self, number: int, length: int) -> torch.Tensor:
        """A plain softmax over the whole beginning of one request."""
        rows = (self.qkv[number][:length] + self.bias.to(self.dtype)).view(length, -1, self.dim)
        ends = (self.heads, self.heads + self.kv_heads)
        q, k, v = rows.tensor_split(ends, 1)
        q, k = (self.turned(x, norm, length) for x, norm in zip((q, k), self.norms, strict=True))
        k, v = k.to(self.dtype).float(), v.float()
        group = self.heads // self.kv_heads
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("thd,nhd->htn", q, k) / math.sqrt(self.dim)
        beyond = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(beyond, -torch.inf).softmax(-1)
        return torch.einsum("htn,nhd->thd", weights, v).flatten(1)

    def turned(self, heads: torch.Tensor, weight: torch.Tensor, length: int) -> torch.Tensor:
        flat = heads.reshape(-1, self.dim).contiguous()
        normal: torch.Tensor = torch.ops.tasuki.rms_norm(flat, weight, 1e-6)
        normal = normal.view(heads.shape).float()
        cos, sin = (t[:length, None, :].repeat(1, 1, 2) for t in (self.cos, self.sin))
        half = self.dim // 2
        swapped = torch.cat([-normal[..., half:], normal[..., :half]], -1)
        return normal * cos + swapped * sin


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Bias, norms of q and k, rotary positions, the paged cache and the softmax, all at once."""
    torch.manual_seed(0)
    case = Case(shape, dtype)
    (whole,) = case.attend([(0, 0, POSITIONS)])
    torch.testing.assert_close(
        whole.float(), case.expected(0, POSITIONS), rtol=0, atol=10 * tolerance(dtype)
    )
    # in chunks, beside others, one by one at the end: the same bits
    again = Case(shape, dtype)
    again.__dict__.update({k: v for k, v in case.__dict__.items() if k != "cache"})
    again.cache.fill_(torch.nan)
    found = [again.attend([(1, 0, 5), (0, 0, 100)])[1], again.attend([(0, 100, 190), (2, 0, 7)])[0]]
    found += [again.attend([(1, 5 + n, 1), (0, 290 + n, 1)])[1] for n in range(10)]
    assert torch.equal(torch.cat(found), whole)


def test_threads_change_nothing() -> None:
    case = Case(SHAPES[0], torch.float32)
    (whole,) = case.attend([(0, 0, POSITIONS)])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            assert torch.equal(case.attend([(0, 0, POSITIONS)])[0], whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"entries": [[0, 0, 0, 0]]}, "outside the step"),
        ({"entries": [[2, 4, 0, 0]]}, "outside the step"),
        ({"entries": [[0, 4, -1, 0]]}, "outside the step"),
        ({"entries": [[0, 4, 10_000, 0]]}, "too few blocks"),
        ({"entries": [[0, 4, 0, 99]]}, "too few blocks"),
        ({"blocks": [7]}, "does not exist"),
        ({"blocks": [-1]}, "does not exist"),
        ({"layer": 2}, "not of this model"),
        ({"heads": 5}, "shared evenly"),
        ({"cos": torch.zeros(2, 8)}, "beyond the rotary table"),
        ({"cache": torch.zeros(2, 2, 2, 2, 256, dtype=torch.bfloat16)}, "of one type"),
        ({"qkv": torch.zeros(4, 129)}, "wide"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], words: str) -> None:
    """A mistake of a caller is an error, not a read beyond the end."""
    given: dict[str, object] = {
        "qkv": torch.zeros(4, 128),
        "cos": torch.zeros(64, 8),
        "entries": [[0, 4, 0, 0]],
        "blocks": [1],
        "cache": torch.zeros(2, 2, 2, 2, 256),
        "layer": 1,
        "heads": 4,
    } | change
    given.setdefault("sin", given["cos"])
    layer = 0 if "blocks" in change else given["layer"]
    with pytest.raises(RuntimeError, match=words):
        torch.ops.tasuki.attention(
            given["qkv"], None, None, None, 1e-6, given["cos"], given["sin"],
            torch.tensor(given["entries"]), torch.tensor(given["blocks"]), given["cache"],
            layer, given["heads"],
        )  # fmt: skip
