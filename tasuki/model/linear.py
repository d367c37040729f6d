"""Matrix products with fixed weights, prepacked by oneDNN where torch offers it.

Knows nothing about models. Never with one row: there the kernels sum in another order, and a
token's result would depend on what happens to run beside it. Two rows would do for that; with four
or more, oneDNN also takes a kernel that reads the weights half as fast again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

PREPACKED = "onednn-prepacked"
PLAIN = "torch"
MIN_ROWS = 4


class Linear:
    """y = x W^T in `dtype`. `kind` tells how: `onednn-prepacked` or `torch`."""

    def __init__(
        self,
        weight: torch.Tensor,
        *,
        kind: str,
        dtype: torch.dtype = torch.float32,
        rows_hint: int = 256,
    ) -> None:
        """`weight` is dense [out, in]; when prepacked, the caller may drop it."""
        weight = weight.to(dtype)
        self.kind = kind
        self.out_features, self.in_features = weight.shape
        self._packed = kind == PREPACKED
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, rows_hint) if self._packed else weight
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out]; rows is at least MIN_ROWS."""
        assert x.shape[0] >= MIN_ROWS, "a batch is padded to MIN_ROWS"
        if self._packed:
            # The private op that inductor emits for frozen linears; `probe` has tried it.
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, None, "none", [], ""
            )
            return y
        return F.linear(x, self._weight)


def probe(dtype: torch.dtype = torch.float32) -> str:
    """The kind of linear that works here: tried on odd shapes, compared with a plain product."""
    generator = torch.Generator().manual_seed(1)
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    try:
        for rows, width, height in ((4, 48, 33), (5, 96, 160), (64, 72, 40)):
            x = torch.randn(rows, width, generator=generator).to(dtype)
            weight = torch.randn(height, width, generator=generator).to(dtype)
            found = Linear(weight, kind=PREPACKED, dtype=dtype)(x).float()
            expected = F.linear(x.float(), weight.float())
            if not torch.allclose(found, expected, rtol=tolerance, atol=10 * tolerance):
                return PLAIN
    except (RuntimeError, AttributeError, NotImplementedError):
        return PLAIN  # torch without oneDNN, or one that renamed its private ops
    return PREPACKED
