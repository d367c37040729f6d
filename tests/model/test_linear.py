"""Linear: both kinds give the product; the probe falls back where prepacking does not work."""

from __future__ import annotations

import pytest
import torch

from tasuki.model import linear
from tasuki.model.linear import MIN_ROWS, NATIVE, PLAIN, PREPACKED, Linear, probe
from tasuki.model.weight_memory import ALIGNMENT, REGION_BYTES, WeightMemory


@pytest.mark.parametrize("kind", [NATIVE, PREPACKED, PLAIN])
@pytest.mark.parametrize(("rows", "width", "height"), [(4, 8, 3), (5, 64, 192), (40, 100, 33)])
def test_product(kind: str, rows: int, width: int, height: int) -> None:
    x, weight = torch.randn(rows, width), torch.randn(height, width)
    expected = (x.double() @ weight.double().T).float()
    product = Linear(weight, kind=kind)
    assert (product.in_features, product.out_features) == (width, height)
    assert torch.allclose(product(x), expected, atol=1e-4)


@pytest.mark.parametrize("kind", [NATIVE, PREPACKED])
def test_packed_weights_are_a_copy(kind: str) -> None:
    """So the dense ones can be dropped."""
    weight, x = torch.randn(16, 32), torch.randn(4, 32)
    product = Linear(weight, kind=kind)
    before = product(x)
    weight.zero_()
    assert torch.equal(product(x), before)


def test_too_few_rows_are_a_bug() -> None:
    with pytest.raises(AssertionError):
        Linear(torch.randn(4, 4), kind=PREPACKED)(torch.randn(MIN_ROWS - 1, 4))


def test_the_probe_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe() == PREPACKED
    own = torch.ops.tasuki.has_linear(torch.float32)
    assert probe(native=True) == (NATIVE if own else PREPACKED)

    class WithoutOp(Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no such operator")

    class WrongOp(Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x) * 1.01

    for broken in (WithoutOp, WrongOp):
        monkeypatch.setattr(linear, "Linear", broken)
        assert probe() == probe(native=True) == PLAIN


def test_weights_lie_one_after_the_other_and_large_ones_by_themselves() -> None:
    memory = WeightMemory()
    first, second = memory.take(5, torch.float32), memory.take(3, torch.bfloat16)
    assert second.data_ptr() - first.data_ptr() == ALIGNMENT
    large = memory.take(REGION_BYTES // 4 + 1, torch.float32)
    assert large.numel() == REGION_BYTES // 4 + 1
    assert not large[-1]
    assert not first.any()
    first.fill_(1)
    assert not second.any()
