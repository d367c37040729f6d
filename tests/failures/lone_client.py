"""A client in a process of its own, to be killed: `python -m tests.failures.lone_client HOST:PORT`.
Asks what its input says, a JSON object on one line, and says the index of each output; -1 at once.
"""

from __future__ import annotations

import asyncio
import json
import sys

from tasuki.client import Client


async def main(target: str) -> None:
    asked = json.loads(sys.stdin.readline())
    async with Client(target) as client:
        print(-1, flush=True)
        async for output in client.generate(
            prompt_token_ids=asked["token_ids"], max_tokens=asked["max_tokens"], ignore_eos=True
        ):
            print(output.index, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
