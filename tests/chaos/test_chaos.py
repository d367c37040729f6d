"""A cluster under load and under every kind of fault loses, repeats, changes and leaks nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.dist]


@pytest.mark.timeout(300)
def test_a_minute_of_every_fault() -> None:
    """`tasuki chaos` itself fails when a kind of fault, or a state of a handoff, was never hit."""
    command = [sys.executable, "-m", "cli", "chaos", "--duration=60", "--seed=1", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:] + ended.stdout
    result = json.loads(ended.stdout)
    print(f"the worst stall was {result['worst_stall_seconds']} s; {result}")
    assert result["requests"] > 100
    assert result["completed"] + result["cancelled"] == result["requests"]


@pytest.mark.timeout(900)
def test_a_thousand_requests() -> None:
    command = [sys.executable, "-m", "cli", "chaos", "--requests=1000", "--seed=3", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=880, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:] + ended.stdout
    print(ended.stdout)
