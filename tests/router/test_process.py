"""`python -m router` as a process: torch-free, its ready line, its lifeline, its refusals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tasuki.messages import Role
from tasuki.server.grpc_server import internal_channel
from tasuki.v1 import common_pb2, common_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.router.fake_worker import FakeWorker, wait_until

ROUTER = [sys.executable, "-m", "router"]


@asynccontextmanager
async def router_process(
    model_directory: Path, worker: FakeWorker
) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any], int]]:
    """The process, its ready line, and the descriptor that keeps it alive."""
    lifeline, alive = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *ROUTER,
        f"--model={model_directory}",
        f"--decode-workers={worker.address}",
        f"--lifeline-fd={lifeline}",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=(lifeline,),
    )
    os.close(lifeline)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            line = await process.stdout.readline()
        yield process, json.loads(line), alive
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_serves_a_request_and_ends_when_told(model_directory: Path) -> None:
    worker = FakeWorker(Role.DECODE, "d0")
    await worker.start()
    async with router_process(model_directory, worker) as (process, ready, alive):
        assert ready["role"] == "router"
        assert (ready["worker_id"], ready["engine_pid"]) == ("", 0)
        assert ready["pid"] == process.pid
        channel = internal_channel(ready["address"])
        server, inference = (
            common_pb2_grpc.ServerStub(channel),
            inference_pb2_grpc.InferenceStub(channel),
        )
        facts: dict[str, str] = {}
        async with asyncio.timeout(10):
            while facts.get("ready") != "true":
                info = await server.GetServerInfo(common_pb2.GetServerInfoRequest())
                facts = dict(info.facts)
        [seen] = json.loads(facts["workers"])
        assert (seen["worker_id"], seen["state"]) == ("d0", "ready")
        assert info.config["decode_workers"] == worker.address
        request = inference_pb2.GenerateRequest(text="x")
        request.sampling.max_tokens = 3
        texts = [message.text async for message in inference.Generate(request, timeout=10)]
        assert "".join(texts) == "ABC"
        await channel.close()
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            assert await process.wait() == 0
        os.close(alive)
    await worker.stop()


async def test_ends_with_its_parent(model_directory: Path) -> None:
    worker = FakeWorker(Role.DECODE, "d0")
    await worker.start()
    async with router_process(model_directory, worker) as (process, _, alive):
        await wait_until(lambda: worker.watch_requests > 0, "it follows the worker", 10)
        os.close(alive)
        async with asyncio.timeout(5):
            await process.wait()
    await worker.stop()


def test_refusals_are_one_line_and_a_status(tmp_path: Path) -> None:
    for arguments, words in (
        (["--decode-workers=127.0.0.1:1"], "--model is empty"),
        ([f"--model={tmp_path}"], "--decode-workers is empty"),
        ([f"--model={tmp_path}", "--decode-workers=127.0.0.1:1"], "no config.json"),
    ):
        done = subprocess.run(
            [*ROUTER, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2
        assert words in done.stderr
        assert "Traceback" not in done.stderr


def test_the_router_never_loads_torch() -> None:
    code = "import router.process, router.__main__, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
