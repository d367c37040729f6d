"""`python -m decode`: the server process of a decode worker. Torch-free; its engine is a child."""

from __future__ import annotations

import asyncio
import sys

from tasuki import config as configuration
from tasuki.config import WorkerConfig
from tasuki.engine.affinity import pin
from tasuki.engine.process_client import ProcessEngineClient
from tasuki.messages import Role
from tasuki.server.worker import serve_worker

DESCRIPTION = "A decode worker: receives KV, generates, and computes prompts itself when it must."


def main() -> int:
    config = configuration.load(
        WorkerConfig, "python -m decode", DESCRIPTION, sections=("worker", "decode")
    )
    pin(config.cpus)
    return asyncio.run(
        serve_worker(Role.DECODE, config, lambda c: ProcessEngineClient("decode.engine", c))
    )


if __name__ == "__main__":
    sys.exit(main())
