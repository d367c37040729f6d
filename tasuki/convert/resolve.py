"""What `--model` may be, as a model directory: one, a GGUF file, or a name on a hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tasuki.cache_root import cache_root
from tasuki.convert.gguf_directory import ensure_gguf
from tasuki.convert.hub import ensure_hub_model, is_hub_name
from tasuki.errors import ModelError

FORMS = "a model directory, a .gguf file, or owner/name on a hub"


def resolve_model(text: str, env: Mapping[str, str] | None = None, *, weights: bool = True) -> Path:
    """A path that exists goes first. May convert or download, which takes as long as it takes; who
    does without `weights` need not wait for a download of them.

    Raises ModelError saying what was looked for.
    """
    if not text:
        raise ModelError(f"--model is empty; expected {FORMS}")
    try:
        path = Path(text).expanduser()
        is_there, is_directory = path.exists(), path.is_dir()
    except (OSError, RuntimeError) as error:  # a name too long, or a user's home that is none
        raise ModelError(f"--model is {text[:200]}, which is no path: {error}"[:400]) from None
    if path.suffix == ".gguf" and not is_directory:
        return ensure_gguf(path, cache_root(os.environ if env is None else env))
    if is_there:
        return path.absolute()
    if is_hub_name(text):
        return ensure_hub_model(text, weights=weights)
    raise ModelError(f"--model is {text[:200]}, which does not exist; expected {FORMS}")
