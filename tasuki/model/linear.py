"""Matrix products with fixed weights: by the compiled kernels, by oneDNN, or by plain torch.

Knows nothing about models. The compiled kernels give a row the same bits with any rows beside it,
because each output adds its products in one order. The other two do so only when they are never
given a single row: there they sum in another order. Two rows would do for that; with four or more,
oneDNN also takes a kernel that reads the weights half as fast again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tasuki.model.weight_memory import WeightMemory

NATIVE = "native"
PREPACKED = "onednn-prepacked"
PLAIN = "torch"
MIN_ROWS = 4


class Linear:
    """y = x W^T in `dtype`. `kind` tells how: `native`, `onednn-prepacked` or `torch`."""

    def __init__(
        self,
        weight: torch.Tensor,
        *,
        kind: str,
        dtype: torch.dtype = torch.float32,
        rows_hint: int = 256,
        memory: WeightMemory | None = None,
    ) -> None:
        """`weight` is dense [out, in]; unless the kind is `torch`, the caller may drop it.

        `native` keeps it in `memory`, and needs `tasuki.native.library.load` to have come first.
        """
        weight = weight.to(dtype)
        self.kind = kind
        self.out_features, self.in_features = weight.shape
        if kind == NATIVE:
            size = torch.ops.tasuki.packed_weight_size(*weight.shape, dtype)
            self._weight = (memory or WeightMemory()).take(size, dtype)
            torch.ops.tasuki.pack_weight(weight.contiguous(), self._weight)
        elif kind == PREPACKED:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, rows_hint)
        else:
            self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out]; rows is at least MIN_ROWS."""
        assert x.shape[0] >= MIN_ROWS, "a batch is padded to MIN_ROWS"
        y: torch.Tensor
        if self.kind == NATIVE:
            y = torch.ops.tasuki.linear(x, self._weight, self.out_features)
        elif self.kind == PREPACKED:
            # The private op that inductor emits for frozen linears; `probe` has tried it.
            y = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
        else:
            y = F.linear(x, self._weight)
        return y


def probe(dtype: torch.dtype = torch.float32, *, native: bool = False) -> str:
    """The best kind of linear that works here: tried on odd shapes, compared with a plain product.

    With `native` (the compiled kernels are loaded) they come first, where they were made for this
    processor and dtype.
    """
    if native and torch.ops.tasuki.has_linear(dtype) and _works(NATIVE, dtype):
        return NATIVE
    return PREPACKED if _works(PREPACKED, dtype) else PLAIN


def _works(kind: str, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(1)
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    try:
        for rows, width, height in ((4, 48, 33), (5, 97, 160), (64, 72, 40)):
            x = torch.randn(rows, width, generator=generator).to(dtype)
            weight = torch.randn(height, width, generator=generator).to(dtype)
            found = Linear(weight, kind=kind, dtype=dtype)(x).float()
            expected = F.linear(x.float(), weight.float())
            if not torch.allclose(found, expected, rtol=tolerance, atol=10 * tolerance):
                return False
    except (RuntimeError, AttributeError, NotImplementedError):
        return False  # torch without oneDNN, or one that renamed its private ops
    return True
