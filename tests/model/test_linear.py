"""Linear: both kinds give the product; the probe falls back where prepacking does not work."""

from __future__ import annotations

import pytest
import torch

from tasuki.model import linear
from tasuki.model.linear import MIN_ROWS, PLAIN, PREPACKED, Linear, probe


@pytest.mark.parametrize("kind", [PREPACKED, PLAIN])
@pytest.mark.parametrize(("rows", "width", "height"), [(4, 8, 3), (5, 64, 192), (40, 100, 33)])
def test_product(kind: str, rows: int, width: int, height: int) -> None:
    x, weight = torch.randn(rows, width), torch.randn(height, width)
    expected = (x.double() @ weight.double().T).float()
    product = Linear(weight, kind=kind)
    assert (product.in_features, product.out_features) == (width, height)
    assert torch.allclose(product(x), expected, atol=1e-4)


def test_packed_weights_are_a_copy() -> None:
    """So the dense ones can be dropped."""
    weight, x = torch.randn(16, 32), torch.randn(4, 32)
    product = Linear(weight, kind=PREPACKED)
    before = product(x)
    weight.zero_()
    assert torch.equal(product(x), before)


def test_too_few_rows_are_a_bug() -> None:
    with pytest.raises(AssertionError):
        Linear(torch.randn(4, 4), kind=PREPACKED)(torch.randn(MIN_ROWS - 1, 4))


def test_the_probe_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe() == PREPACKED

    class WithoutOp(Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no such operator")

    class WrongOp(Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x) * 1.01

    for broken in (WithoutOp, WrongOp):
        monkeypatch.setattr(linear, "Linear", broken)
        assert probe() == PLAIN
