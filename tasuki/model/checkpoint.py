"""The safetensors files of a model directory: which tensor is where, read one at a time.

Knows nothing about what the tensors are for. Never opens a pickle (`.bin`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tasuki.errors import ModelError
from tasuki.model.fields import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights, sorted by name. Raises ModelError when one is missing."""
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    return sorted({directory / name for name in _weight_map(directory).values()})


def _weight_map(directory: Path) -> Mapping[str, str]:
    index = directory / INDEX
    if not index.is_file():
        pickles = " (only .bin files, which are never read)" if [*directory.glob("*.bin")] else ""
        raise ModelError(f"{directory} has neither {SINGLE} nor {INDEX}{pickles}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map; expected tensor names with file names")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index} puts {tensor} into {name!r}; expected a file name")
        if not (directory / name).is_file():
            raise ModelError(f"{index} puts {tensor} into {name}, which is missing")
    return weight_map


class Checkpoint:
    """All tensors of one directory by name. A context manager: it holds its files mapped."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files = contextlib.ExitStack()
        self._file_of: dict[str, tuple[Path, Any]] = {}
        try:
            for path in weight_files(directory):
                with _named(path):
                    opened = self._files.enter_context(safe_open(path, framework="pt"))
                    names = set(opened.keys())
                twice = sorted(names & self._file_of.keys())
                if twice:
                    raise ModelError(
                        f"tensor {twice[0]} is in {path} and in {self._file_of[twice[0]][0]}; "
                        "expected it once"
                    )
                self._file_of |= {name: (path, opened) for name in names}
        except BaseException:
            self._files.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.close()
        self._file_of.clear()

    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ModelError unless the tensor is there, has this shape, and holds floats."""
        if name not in self._file_of:
            raise ModelError(
                f"{self.directory} has no tensor {name}; expected one of shape {list(shape)}"
            )
        path, opened = self._file_of[name]
        with _named(path):
            entry = opened.get_slice(name)
            found, dtype = tuple(entry.get_shape()), str(entry.get_dtype())
        if found != shape:
            raise ModelError(
                f"tensor {name} in {path} has shape {list(found)}; "
                f"config.json asks for {list(shape)}"
            )
        if dtype not in FLOATS:
            raise ModelError(
                f"tensor {name} in {path} holds {dtype}; "
                f"expected one of {', '.join(sorted(FLOATS))}"
            )

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One tensor as float32, a copy of its own. Raises ModelError as `require` does, or for
        NaN.
        """
        self.require(name, shape)
        path, opened = self._file_of[name]
        with _named(path):
            # a copy: one tensor that lived on would keep the whole file mapped
            tensor: torch.Tensor = opened.get_tensor(name).to(torch.float32, copy=True)
        if not torch.isfinite(tensor.sum(dtype=torch.float64)):
            raise ModelError(f"tensor {name} in {path} holds NaN or infinite values")
        return tensor


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise ModelError(f"{path} is no valid safetensors file: {error}") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
