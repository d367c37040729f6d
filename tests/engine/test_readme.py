"""The README's lines for the engine in process do what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tasuki.convert.tiny import make_tiny

ROOT = Path(__file__).resolve().parents[2]


def test_the_engine_in_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny(tmp_path / "tiny")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "Engine.load" in block]
    exec(compile(code.replace("/path/to/a/model", str(model)), "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    tokens = [line for line in lines if re.fullmatch(r"mine \[\d+\]", line)]
    assert 1 <= len(tokens) <= 5  # fewer where it ends by itself
