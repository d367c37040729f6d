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
    """y = x W^T. `kind` tells how: `onednn-prepacked` or `torch`."""

    def __init__(self, weight: torch.Tensor, *, kind: str, rows_hint: int = 256) -> None:
        """`weight` is dense float32 [out, in]; when prepacked, the caller may drop it."""
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


def probe() -> str:
    """The kind of linear that works here: tried on odd shapes, compared with a plain product."""
    generator = torch.Generator().manual_seed(1)
    try:
        for rows, width, height in ((4, 48, 33), (5, 96, 160), (64, 72, 40)):
            x = torch.randn(rows, width, generator=generator)
            weight = torch.randn(height, width, generator=generator)
            found = Linear(weight, kind=PREPACKED)(x)
            if not torch.allclose(found, F.linear(x, weight), rtol=1e-4, atol=1e-3):
                return PLAIN
    except (RuntimeError, AttributeError, NotImplementedError):
        return PLAIN  # torch without oneDNN, or one that renamed its private ops
    return PREPACKED
