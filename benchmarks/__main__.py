"""`python -m benchmarks [handoff|engine|all]`: ratios taken in one run, as Markdown."""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
from pathlib import Path

from benchmarks import engine, handoff
from benchmarks.machine import describe

NAMES = ("handoff", "engine")


def commit() -> str:
    """The commit that was measured, marked when the tree differs from it."""
    command = ["git", "describe", "--always", "--dirty"]
    root = Path(__file__).resolve().parents[1]
    answer = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("which", nargs="?", default="all", choices=(*NAMES, "all"))
    parser.add_argument("--rounds", type=int, default=0, help="0: each benchmark's own number")
    given = parser.parse_args()
    wanted = NAMES if given.which == "all" else (given.which,)
    print(f"{datetime.date.today()}, commit {commit()}: {describe()}")
    if "handoff" in wanted:
        rounds = given.rounds or handoff.ROUNDS
        print(f"\n{handoff.report(handoff.measure(rounds), rounds)}", flush=True)
    if "engine" in wanted:
        rounds = given.rounds or engine.ROUNDS
        print(f"\n{engine.report(engine.measure(rounds), rounds)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
