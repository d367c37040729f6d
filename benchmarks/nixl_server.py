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
import signal
import sys
import threading
from typing import Any

# In the environment, so that vLLM's own children see it: microseconds that a progress thread may
# sleep. Less than a thousand is none.
PROGRESS_DELAY = "TASUKI_BENCH_PROGRESS_DELAY"


def correct(delay: int) -> None:
    vars(os)["sched_setaffinity"] = lambda pid, cores: None
    bindings: Any = importlib.import_module("nixl_cu12._bindings")
    agent = bindings.nixlAgent

    def patient_agent(name: str, config: Any) -> Any:
        config.pthrDelay = delay
        return agent(name, config)

    bindings.nixlAgent = patient_agent


# At import: a child that vLLM spawns imports this file anew.
if PROGRESS_DELAY in os.environ:
    correct(int(os.environ[PROGRESS_DELAY]))


def die_with_parent() -> None:
    """End with all children once standard input does: whoever started this process is gone."""
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=die_with_parent, daemon=True).start()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
