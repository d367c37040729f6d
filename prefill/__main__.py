"""`python -m prefill`: the server process of a prefill worker. Torch-free; the engine is its
child.
"""

from __future__ import annotations

import asyncio
import sys

from tasuki import config as configuration
from tasuki.config import WorkerConfig
from tasuki.engine.affinity import pin
from tasuki.engine.process_client import ProcessEngineClient
from tasuki.messages import Role
from tasuki.server.worker import serve_worker

DESCRIPTION = "A prefill worker: computes prompts and sends their KV to decode workers."


def main() -> int:
    config = configuration.load(
        WorkerConfig, "python -m prefill", DESCRIPTION, sections=("worker", "prefill")
    )
    pin(config.cpus)
    return asyncio.run(
        serve_worker(Role.PREFILL, config, lambda c: ProcessEngineClient("prefill.engine", c))
    )


if __name__ == "__main__":
    sys.exit(main())
