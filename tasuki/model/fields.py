"""One JSON object of a model directory, whose fields are taken out with their type checked.

Knows nothing about what the fields mean. Every error names the file, the field, and what was found.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tasuki.errors import ModelError

MAX_JSON_BYTES = 64 << 20
MAX_INTEGER = (1 << 31) - 1  # more than any size or id of a model; keeps products of sizes sane
MAX_NUMBER = 1e30  # more than any constant of a model; float32 can still hold it


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError when it cannot be read or is no object."""
    try:
        size = file.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ModelError(f"{file} is {size} bytes long; expected at most {MAX_JSON_BYTES}")
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds a JSON {type(value).__name__}; expected an object")
    return value


class Fields:
    """Typed access to a JSON object. A null counts as absent, as the reference writes it."""

    def __init__(self, file: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.file = file
        self._values = values
        self._prefix = prefix

    def raw(self, name: str) -> Any:
        """The value as it stands, None when absent."""
        return self._values.get(name)

    def has(self, name: str) -> bool:
        """Whether it is mentioned, be it as null."""
        return name in self._values

    def section(self, name: str) -> Fields:
        """A nested object; an empty one when absent."""
        value = self.raw(name)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return Fields(self.file, value or {}, f"{self._prefix}{name}.")

    @property
    def is_empty(self) -> bool:
        return not self._values

    @property
    def holds_sections(self) -> bool:
        return any(isinstance(value, dict) for value in self._values.values())

    def positive(self, name: str, default: int | None = None, *, most: int = MAX_INTEGER) -> int:
        """A whole number from one to `most`. Booleans and floats are not whole numbers."""
        value = self.raw(name)
        if value is None:
            if default is None:
                raise ModelError(f"{self.file} has no {self._prefix}{name}; it must give one")
            value = default
        if type(value) is not int or not 0 < value <= most:
            raise self._wrong(name, f"a whole number from 1 to {most}")
        return value

    def positive_number(self, name: str, default: float) -> float:
        """A number above zero, at most MAX_NUMBER."""
        value = self.raw(name)
        if value is None:
            value = default
        if type(value) not in (int, float) or not 0 < value <= MAX_NUMBER:
            raise self._wrong(name, f"a number above zero, at most {MAX_NUMBER:g}")
        return float(value)

    def number(self, name: str, default: float) -> float:
        """A number from 0 to MAX_NUMBER."""
        value = self.raw(name)
        if value is None:
            value = default
        if type(value) not in (int, float) or not 0 <= value <= MAX_NUMBER:
            raise self._wrong(name, f"a number from 0 to {MAX_NUMBER:g}")
        return float(value)

    def required_number(self, name: str) -> float:
        """A number above zero that must be there."""
        if self.raw(name) is None:
            raise ModelError(f"{self.file} has no {self._prefix}{name}; it must give one")
        return self.positive_number(name, 0.0)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self._wrong(name, "true or false")
        return value

    def token_ids(self, name: str, vocab_size: int) -> list[int]:
        """One token id or a list of them; empty when absent."""
        value = self.raw(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(id_) is not int or not 0 <= id_ < vocab_size for id_ in ids):
            raise self._wrong(name, f"token ids from 0 to {vocab_size - 1}")
        return ids

    def _wrong(self, name: str, expected: str) -> ModelError:
        found = repr(self.raw(name))[:60]
        return ModelError(f"{self.file} has {self._prefix}{name} = {found}; expected {expected}")
