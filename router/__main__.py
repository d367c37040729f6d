"""`python -m router`: reads the command line, runs one router, exits with its status."""

from __future__ import annotations

import asyncio
import sys

from router.config import RouterConfig
from router.process import run
from tasuki.config import load
from tasuki.errors import TasukiError
from tasuki.server.lifecycle import configure_logging

DESCRIPTION = """The router of a tasuki cluster: admits requests, places each on a decode worker
(and names prefill workers to it), and streams tokens back. Holds no model weights."""


def main() -> int:
    config = load(RouterConfig, "python -m router", DESCRIPTION, sections=("router",))
    configure_logging("router")
    try:
        return asyncio.run(run(config))
    except TasukiError as error:
        print(f"router: {error.message}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
