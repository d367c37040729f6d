"""Runs `tasuki up` with stand-ins for its processes. Started by tests as a process of its own.

`run_up.py [ROLE=HABIT,HABIT]... -- FLAGS...`
"""

from __future__ import annotations

import asyncio
import sys

from cli.command import Command
from cli.interrupts import die_with_parent, run_interruptible
from cli.main import main
from cli.up import UpRun
from cli.up_config import UpConfig
from tests.cli.programs import nothing_missing, standin


def run_with_standins() -> int:
    split = sys.argv.index("--")
    habits = {
        role: words.split(",")
        for role, _, words in (given.partition("=") for given in sys.argv[1:split])
    }

    def run_up(config: UpConfig) -> int:
        if config.die_with_parent:
            die_with_parent(config.die_with_parent)
        up = UpRun(config, program=standin(habits), probe=nothing_missing)
        return asyncio.run(run_interruptible(up.serve(), up.kill_all))

    command = Command(name="up", summary="", help="", config=UpConfig, run=run_up)
    return main(["up", *sys.argv[split + 1 :]], commands=(command,))


if __name__ == "__main__":
    sys.exit(run_with_standins())
