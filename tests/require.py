"""Skips that name their reason, and become failures where everything must be there.

`TASUKI_REQUIRE` holds `all`, or names such as `demo,transformers`: what may not be missing here.
CI sets `all`, so a test cannot stop running there unnoticed. A GPU is exempt from `all`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest

EXEMPT = frozenset({"gpu"})


def required(name: str, env: Mapping[str, str] | None = None) -> bool:
    """Whether the environment says that `name` must be there."""
    text = (os.environ if env is None else env).get("TASUKI_REQUIRE", "")
    words = {word.strip() for word in text.split(",")}
    return name in words or ("all" in words and name not in EXEMPT)


def require(name: str, available: object, reason: str) -> None:
    """Go on if `available` is true; otherwise skip with `reason`, or fail if `name` is required."""
    if available:
        return
    if required(name):
        pytest.fail(f"TASUKI_REQUIRE names {name}, but: {reason}", pytrace=False)
    pytest.skip(reason)
