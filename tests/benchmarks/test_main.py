"""The command line, without measuring anything."""

from __future__ import annotations

import json

import pytest

from benchmarks import __main__ as command
from benchmarks import handoff
from benchmarks.handoff import HandoffResult, SizeResult
from benchmarks.machine import describe
from benchmarks.rounds import Spread

ONE = Spread(1.0, 1.0, 1.0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rounds that the handoff benchmark was asked for; it answers at once."""
    rounds: list[int] = []

    def measure(count: int) -> HandoffResult:
        rounds.append(count)
        return HandoffResult((SizeResult(8, ONE, ONE, ONE),), count, 1, 1.0, "cubic")

    monkeypatch.setattr(handoff, "measure", measure)
    return rounds


def test_json_is_one_object_with_what_was_measured_where(
    asked: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["handoff", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert asked == [handoff.ROUNDS]
    assert set(found) == {"date", "commit", "machine", "handoff"}
    assert found["handoff"]["sizes"][0]["ratio"]["median"] == 1.0


def test_markdown_says_which_machine_and_commit(
    asked: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["handoff", "--rounds", "3"]) == 0
    first, rest = capsys.readouterr().out.split("\n", 1)
    assert asked == [3]
    assert f"commit {command.commit()}: {describe()}" in first
    assert "### Handoff on loopback" in rest


@pytest.mark.parametrize("arguments", [["nothing"], ["--rounds", "0"], ["--rounds", "x"]])
def test_nonsense_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err
