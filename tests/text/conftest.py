"""The tiny model's tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki.convert.tiny import make_tiny


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")
