"""The compiled matrix product: right, and a row's bits are its own at any number of rows."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tasuki.cache_root import cache_root
from tasuki.native import library

DTYPES = (torch.float32, torch.bfloat16)
# inputs, outputs: whole panels and odd ones, an odd number of pairs, one of each
SHAPES = [(576, 192), (1536, 64), (149, 331), (1, 1), (33, 65), (72, 24)]


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    assert library.load(cache_root(os.environ))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_processor_with_a_multiply_add_has_it_in_float32() -> None:
    assert torch.ops.tasuki.has_linear(torch.float32) == (
        torch.ops.tasuki.instructions() != "plain"
    )


def packed(weight: torch.Tensor) -> torch.Tensor:
    size = torch.ops.tasuki.packed_weight_size(*weight.shape, weight.dtype)
    memory = torch.full((size,), torch.nan, dtype=weight.dtype)  # packing leaves none of it
    torch.ops.tasuki.pack_weight(weight, memory)
    return memory


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product(shape: tuple[int, int], dtype: torch.dtype) -> None:
    inputs, outputs = shape
    x, weight = torch.randn(20, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    found = torch.ops.tasuki.linear(x, packed(weight), outputs)
    assert found.dtype is dtype
    true = x.double() @ weight.double().T
    error = (found.double() - true).abs()
    # a rounding of the result, and roundings of a sum of so many products
    allowed = true.abs() * (2**-8 if dtype is torch.bfloat16 else 2**-23) + 1e-6 * inputs
    assert (error <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_is_its_own_business(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Alone, among a few, among hundreds, wherever it stands, on any threads."""
    inputs, outputs = shape
    x, weight = torch.randn(400, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    memory = packed(weight)
    whole = torch.ops.tasuki.linear(x, memory, outputs)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(torch.ops.tasuki.linear(x, memory, outputs), whole)
        for first, last in [(0, n) for n in range(1, 15)] + [(7, 8), (399, 400), (50, 250)]:
            found = torch.ops.tasuki.linear(x[first:last], memory, outputs)
            assert torch.equal(found, whole[first:last]), (threads, first, last)


def test_a_stranger_with_nan_does_no_harm() -> None:
    x, weight = torch.randn(13, 96), torch.randn(40, 96)
    memory = packed(weight)
    whole = torch.ops.tasuki.linear(x, memory, 40)
    x[5] = torch.nan
    found = torch.ops.tasuki.linear(x, memory, 40)
    assert found[5].isnan().all()
    others = [*range(5), *range(6, 13)]
    assert torch.equal(found[others], whole[others])


def test_no_rows() -> None:
    assert torch.ops.tasuki.linear(torch.empty(0, 8), packed(torch.ones(3, 8)), 3).shape == (0, 3)


@pytest.mark.parametrize(
    ("x", "outputs", "words"),
    [
        (torch.ones(2, 9), 3, "no weight for 9 inputs"),
        (torch.ones(2, 8), 65, "65 outputs"),
        (torch.ones(2, 8), 0, "0 outputs"),
        (torch.ones(2, 8).bfloat16(), 3, "no weight"),
        (torch.ones(2, 8).double(), 3, "float32 or bfloat16"),
        (torch.ones(2, 16)[:, ::2], 3, "no dense CPU tensor"),
    ],
)
def test_what_does_not_fit_is_refused(x: torch.Tensor, outputs: int, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        torch.ops.tasuki.linear(x, packed(torch.ones(3, 8)), outputs)


def test_memory_of_another_size_is_refused() -> None:
    with pytest.raises(RuntimeError, match="packed_weight_size"):
        torch.ops.tasuki.pack_weight(torch.ones(3, 8), torch.ones(3 * 8))
