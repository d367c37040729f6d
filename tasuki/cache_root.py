"""Where converted models and compiled kernels are kept between runs: one folder per user."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tasuki.errors import ConfigError


def cache_root(env: Mapping[str, str]) -> Path:
    """`TASUKI_CACHE`, else `XDG_CACHE_HOME/tasuki`, else `~/.cache/tasuki`; it may not exist yet.

    Raises ConfigError when TASUKI_CACHE is a file, or when there is no home directory to fall back
    to.
    """
    if env.get("TASUKI_CACHE"):
        root = Path(env["TASUKI_CACHE"]).expanduser()
        if root.exists() and not root.is_dir():
            raise ConfigError(f"TASUKI_CACHE is {root}, which is a file; expected a directory")
        return root
    if Path(env.get("XDG_CACHE_HOME", "")).is_absolute():  # the standard says: ignore relative ones
        return Path(env["XDG_CACHE_HOME"]) / "tasuki"
    if env.get("HOME"):
        return Path(env["HOME"]) / ".cache" / "tasuki"
    try:
        return Path.home() / ".cache" / "tasuki"
    except RuntimeError:
        raise ConfigError("there is no home directory; set TASUKI_CACHE to a directory") from None
