"""What a converted directory should hold, by size and sha256, written beside its files.

Knows nothing about models. Checks half a gigabyte in about a third of a second.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

NAME = "tasuki-manifest.json"


def sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def write_manifest(directory: Path, recipe: str) -> None:
    """Describe every file of `directory`. `recipe` names what it was made from, and how."""
    files = {
        file.name: {"size": file.stat().st_size, "sha256": sha256(file)}
        for file in sorted(directory.iterdir())
        if file.name != NAME
    }
    text = json.dumps({"recipe": recipe, "files": files}, indent=2)
    (directory / NAME).write_text(text + "\n", encoding="utf-8")


def matches_manifest(directory: Path, recipe: str) -> bool:
    """Whether `directory` was made by this recipe and every file is as it was written."""
    try:
        manifest: Any = json.loads((directory / NAME).read_text(encoding="utf-8"))
        if manifest["recipe"] != recipe:
            return False
        return all(
            (directory / name).stat().st_size == entry["size"]
            and sha256(directory / name) == entry["sha256"]
            for name, entry in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
