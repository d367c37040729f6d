"""Element-wise functions: right, and the same bits wherever an element stands, on any threads."""

from __future__ import annotations

import pytest
import torch

from tasuki.model.elementwise import exp2_, silu_product


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_exp2(threads: int) -> None:
    torch.set_num_threads(threads)
    x = torch.randn(1600, 64) * 20
    x[0, :5] = torch.tensor([-torch.inf, 0.0, -1.0, 3.0, -200.0])
    y = exp2_(x.clone())
    assert y[0, :5].tolist() == [0.0, 1.0, 0.5, 8.0, 0.0]
    assert torch.allclose(y, torch.pow(2.0, x.double()).float(), rtol=1e-6)
    torch.set_num_threads(1)
    for first, last in ((0, 1), (3, 4), (7, 800), (1, 1600)):
        assert torch.equal(exp2_(x[first:last].clone()), y[first:last])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("width", [64, 149, 33000])
def test_silu_product(threads: int, width: int) -> None:
    torch.set_num_threads(threads)
    x = torch.randn(9 if width > 1000 else 400, 2 * width) * 4
    y = silu_product(x)
    gate, up = x[:, :width].double(), x[:, width:].double()
    assert torch.allclose(y, (gate * gate.sigmoid() * up).float(), atol=1e-5)
    torch.set_num_threads(1)
    for first, last in ((0, 2), (3, 8), (2, len(x))):
        assert torch.equal(silu_product(x[first:last]), y[first:last])
