"""Where the cache is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki.cache_root import cache_root
from tasuki.errors import ConfigError


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"TASUKI_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/tasuki"),
        ({"TASUKI_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/tasuki"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/c"}, "/c/.cache/tasuki"),
    ],
)
def test_precedence(env: dict[str, str], expected: str) -> None:
    assert cache_root(env) == Path(expected)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="expected a directory"):
        cache_root({"TASUKI_CACHE": str(tmp_path / "file")})
