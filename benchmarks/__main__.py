"""Speed as ratios: against a peer, and beside this machine's limits, all taken in one run.

handoff   KV blocks from one process to another over gloo, against raw TCP
handoff_cost  what digests, heartbeats and the lease cost a handoff
engine    prefill and decode of the demo model, against transformers
scheduler     CPU time to plan a step
prefix_cache  what a real trace finds in the prefix cache, against the optimum
vllm_nixl     a handoff against vLLM's, whose environment must be made first; only when named
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.nixl_peer import PeerError

NAMES = ("handoff", "handoff_cost", "engine", "scheduler", "prefix_cache")
NEEDS_PEER = "vllm_nixl"  # its docstring says how the peer's environment is made


def commit() -> str:
    """The commit that was measured, marked when the tree differs from it."""
    command = ["git", "describe", "--always", "--dirty"]
    root = Path(__file__).resolve().parents[1]
    try:
        answer = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return answer.stdout.strip() or "unknown"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Takes half an hour on two quiet cores, an hour without AVX-512; the engine with "
        "--quick three to seven minutes. Run nothing else beside it.",
    )  # fmt: skip
    parser.add_argument(
        "which", nargs="?", default="all", choices=(*NAMES, NEEDS_PEER, "all"), help="Default: all."
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N",
        help="Rounds that count. Default: 20 handoff, 30 handoff_cost, 7 engine.",
    )  # fmt: skip
    parser.add_argument(
        "--peer-python", type=Path, metavar="PATH",
        help="The Python of the environment that vllm_nixl's peer is installed in.",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="The engine in float32 on one thread only."
    )
    parser.add_argument(
        "--json", action="store_true", help="One JSON object at the end instead of Markdown."
    )
    given = parser.parse_args(argv)
    if given.rounds is not None and given.rounds < 1:
        parser.error(f"--rounds is {given.rounds}; expected at least 1")
    if given.which == NEEDS_PEER and given.peer_python is None:
        parser.error(f"{NEEDS_PEER} needs --peer-python; see benchmarks/{NEEDS_PEER}.py")
    return given


def main(argv: Sequence[str] | None = None) -> int:
    given = parse(argv)
    facts: dict[str, Any] = {
        "date": str(datetime.date.today()),
        "commit": commit(),
        "machine": describe(),
    }
    if not given.json:
        print("{date}, commit {commit}: {machine}".format(**facts), flush=True)
    for name in NAMES if given.which == "all" else (given.which,):
        try:
            benchmark = importlib.import_module(f"benchmarks.{name}")  # only what is asked for
        except ModuleNotFoundError as error:
            print(f"{name}: {error}; install with: pip install -e '.[dev]'", file=sys.stderr)
            return 1
        more = {"engine": {"quick": given.quick}, NEEDS_PEER: {"peer_python": given.peer_python}}
        try:
            result = benchmark.measure(given.rounds or benchmark.ROUNDS, **more.get(name, {}))
        except PeerError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        facts[name] = dataclasses.asdict(result)
        if not given.json:
            print(f"\n{benchmark.report(result)}", flush=True)
    if given.json:
        print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
