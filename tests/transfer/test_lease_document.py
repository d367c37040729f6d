"""docs/lease.md shows what its example prints, and names tests that exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "lease.py"
DOCUMENT = ROOT / "docs" / "lease.md"


def test_the_example_prints_what_the_document_shows(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE))
    printed = capsys.readouterr().out
    states = [line.split()[-2:] for line in printed.splitlines() if "  " in line]
    assert ["committed", "committed"] in states
    assert states[-1] == ["abandoned", "abandoned"]
    assert f"```\n{printed}```" in DOCUMENT.read_text()


def test_the_example_has_at_most_60_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60


def test_every_clause_that_the_document_names_has_a_test() -> None:
    text = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    clauses = re.findall(r"^\| C(\d+) ", DOCUMENT.read_text(), re.MULTILINE)
    assert [int(number) for number in clauses] == [1, 2, 4, 5, 6, 7, 11, 17]
    assert [n for n in clauses if f"def test_c{n}_" not in text] == []
