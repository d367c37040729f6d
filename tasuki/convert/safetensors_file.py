"""Writes a safetensors file one tensor at a time, so that no more than one is in memory.

Knows nothing about models. The format: eight bytes with the length of a JSON header, the header
(type, shape and place of each tensor), then the tensors' bytes, without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ALIGNMENT = 8
BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor to write. `read` gives its values, contiguous, little-endian, of `num_bytes`."""

    name: str
    dtype: str  # as the format calls it: F32, F16, BF16
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray[Any, Any]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * BYTES[self.dtype]


def write_safetensors(file: Path, tensors: Sequence[StoredTensor]) -> None:
    """Raises OSError as writing does, and whatever a `read` raises."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        entry = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (start, end)}
        header[tensor.name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for tensor in tensors:
            values = np.ascontiguousarray(tensor.read())
            assert values.nbytes == tensor.num_bytes, f"{tensor.name} is not what was announced"
            out.write(values.view(np.uint8).data)
