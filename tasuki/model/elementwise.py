"""Functions of single elements whose result does not depend on where an element stands.

torch computes exp2 and silu with a vector routine, and the last few elements of a run with a scalar
one that rounds differently. A run ends where the tensor ends, or where one thread's share ends. So
runs are a multiple of the vector length here, and short enough that torch does not share them out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

RUN = 32704  # elements: a multiple of 64, just below the 32,768 that torch shares among threads
ALIGNMENT = 64


def exp2_(x: torch.Tensor) -> torch.Tensor:
    """2 ** x in place, for a contiguous x whose number of elements is a multiple of 64."""
    flat = x.view(-1)
    assert flat.numel() % ALIGNMENT == 0, "runs must end on whole vectors"
    if torch.get_num_threads() == 1:
        flat.exp2_()
        return x
    for run in torch.split(flat, RUN):
        run.exp2_()
    return x


def silu_product(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for [rows, 2 * width] with the gate first -> [rows, width]. At least two
    rows.

    A row of the gate is a run of its own, since the rows are not adjacent in memory: every row is
    cut into vectors at the same columns.
    """
    width = gate_up.shape[1] // 2
    gate, up = gate_up[:, :width], gate_up[:, width:]
    if torch.get_num_threads() == 1:
        return F.silu(gate).mul_(up)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    for columns, target in zip(torch.split(gate, RUN, 1), torch.split(out, RUN, 1), strict=True):
        height = max(1, RUN // columns.shape[1])
        for rows, rows_out in zip(
            torch.split(columns, height), torch.split(target, height), strict=True
        ):
            torch.ops.aten.silu.out(rows, out=rows_out)
    return out.mul_(up)
