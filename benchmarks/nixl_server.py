"""Run by the peer's Python, never by ours: vLLM's API server, as it is or put right for few cores.

As shipped, the connector moves a worker's main thread to the last core of the machine, so that two
workers on two cores share one; and NIXL's progress threads poll without a pause, which takes a core
from whatever computes on it. Put right, threads stay where they were started, and the progress
threads sleep until there is something to do, at most a millisecond at a time.
"""

from __future__ import annotations

import importlib
import os
import runpy
from typing import Any

CORRECT = "TASUKI_BENCH_CORRECT"  # in the environment, so that vLLM's own children see it
PROGRESS_DELAY = 1000  # microseconds; less than a thousand polls without a pause


def correct() -> None:
    vars(os)["sched_setaffinity"] = lambda pid, cores: None
    bindings: Any = importlib.import_module("nixl_cu12._bindings")
    agent = bindings.nixlAgent

    def patient_agent(name: str, config: Any) -> Any:
        config.pthrDelay = PROGRESS_DELAY
        return agent(name, config)

    bindings.nixlAgent = patient_agent


# At import: a child that vLLM spawns imports this file anew.
if CORRECT in os.environ:
    correct()

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
