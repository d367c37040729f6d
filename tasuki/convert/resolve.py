"""What `--model` may be, as a model directory: one, a GGUF file, or a name on a hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tasuki.cache_root import cache_root
from tasuki.convert.gguf_directory import ensure_gguf
from tasuki.convert.hub import ensure_hub_model, is_hub_name
from tasuki.errors import ModelError


def resolve_model(text: str, env: Mapping[str, str] | None = None, *, weights: bool = True) -> Path:
    """A path that exists goes first. May convert or download, which takes as long as it takes; who
    does without `weights` need not wait for a download of them.

    Raises ModelError saying what was looked for.
    """
    path = Path(text).expanduser()
    if path.suffix == ".gguf" and not path.is_dir():
        return ensure_gguf(path, cache_root(os.environ if env is None else env))
    if path.exists():
        return path.absolute()
    if is_hub_name(text):
        return ensure_hub_model(text, weights=weights)
    raise ModelError(
        f"--model is {text[:200]}, which does not exist; expected a model directory, a .gguf file, "
        "or owner/name on a hub"
    )
