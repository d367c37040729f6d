"""docs/failures.md names a test for every failure, and every test of this folder."""

from __future__ import annotations

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
DOCUMENT = FOLDER.parents[1] / "docs" / "failures.md"


def rows() -> dict[str, list[str]]:
    """The tests that the table names, by failure."""
    _, _, rest = DOCUMENT.read_text().partition("## Where each is tested")
    table = rest.partition("|---|---|\n")[2].partition("\n\n")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return {failure: re.findall(r"`([^`]+)`", tests) for failure, tests in cells}


def functions_of(path: Path) -> list[str]:
    return [
        f"{path.name}::{node.name}"
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    ]


def test_every_failure_has_tests_and_they_exist() -> None:
    found = rows()
    assert len(found) == 26
    assert [failure for failure, names in found.items() if not names] == []
    named = {name for names in found.values() for name in names}
    others = [path for path in FOLDER.glob("test_*.py") if path != Path(__file__)]
    assert named == {name for path in others for name in functions_of(path)}
