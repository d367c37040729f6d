"""The whole server process of a worker: ready line, signals, lifeline, exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from tasuki.server.grpc_server import internal_channel
from tasuki.server.status import error_from_rpc
from tasuki.v1 import common_pb2, common_pb2_grpc, worker_pb2_grpc
from tests.server.running_worker import decode_request, rpc_error
from tests.server.test_http_page import get

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.dist


@dataclass
class Program:
    process: asyncio.subprocess.Process
    lifeline: int  # our end; closing it is the end of the parent
    ready: asyncio.StreamReader
    log: bytes = b""

    async def ready_line(self) -> dict[str, Any]:
        async with asyncio.timeout(20):
            line = await self.ready.readline()
        found: dict[str, Any] = json.loads(line)
        return found

    async def exit_code(self, seconds: float = 10) -> int:
        async with asyncio.timeout(seconds):
            _, self.log = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode


@asynccontextmanager
async def program(*flags: str) -> AsyncIterator[Program]:
    lifeline, ours = os.pipe()
    ready, theirs = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.server.worker_program",
        f"--lifeline-fd={lifeline}",
        f"--ready-fd={theirs}",
        *flags,
        cwd=ROOT,
        pass_fds=(lifeline, theirs),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    os.close(lifeline)
    os.close(theirs)
    reader = asyncio.StreamReader()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ready, "rb")
    )
    made = Program(process, ours, reader)
    try:
        yield made
    finally:
        pipe.close()
        if made.lifeline >= 0:
            os.close(made.lifeline)
        if process.returncode is None:
            process.kill()
            await process.communicate()


@asynccontextmanager
async def stub_of(line: dict[str, Any]) -> AsyncIterator[Any]:
    channel = internal_channel(line["address"])
    try:
        yield worker_pb2_grpc.WorkerStub(channel)
    finally:
        await channel.close()


async def test_ready_serve_drain_exit() -> None:
    async with program("--model=tiny") as worker:
        line = await worker.ready_line()
        assert line["role"] == "decode"
        assert line["worker_id"] == line["address"]
        assert line["pid"] == worker.process.pid
        assert await worker.ready.read() == b""  # one line, and the descriptor is closed
        assert (await get(line["metrics"], "/readyz"))[0] == 200
        async with stub_of(line) as stub:
            answer = [event async for event in stub.Decode(decode_request(), timeout=10)]
            assert list(answer[0].tokens.token_ids) == [7]
            running = stub.Decode(decode_request("hang"), timeout=10)
            assert list((await running.read()).tokens.token_ids) == [7]
            worker.process.send_signal(signal.SIGTERM)
            refused = None
            while refused is None:  # the signal takes a moment
                try:
                    await stub.Decode(decode_request(), timeout=10).read()
                except grpc.aio.AioRpcError as error:
                    refused = error_from_rpc(error)
            assert refused.reason == "draining"
            running.cancel()
        assert await worker.exit_code() == 0
        text = worker.log.decode()
        assert text.count("configuration {") == 1
        assert f'"port": "{line["address"].rsplit(":", 1)[1]}"' in text


async def test_a_second_signal_exits_now() -> None:
    async with program() as worker:
        line = await worker.ready_line()
        async with stub_of(line) as stub:
            running = stub.Decode(decode_request("hang"), timeout=10)
            await running.read()
            worker.process.send_signal(signal.SIGINT)
            while (await get(line["metrics"], "/readyz"))[0] == 200:
                pass
            worker.process.send_signal(signal.SIGINT)
            assert await worker.exit_code(5) == 130


@pytest.mark.parametrize("stream", [True, False], ids=["busy", "idle"])
async def test_the_end_of_the_parent_is_the_end(stream: bool) -> None:
    async with program() as worker:
        async with stub_of(await worker.ready_line()) as stub:
            if stream:
                running = stub.Decode(decode_request("hang"), timeout=10)
                await running.read()
            began = time.monotonic()
            os.close(worker.lifeline)
            worker.lifeline = -1
            await worker.exit_code(5)
        assert time.monotonic() - began < 2


async def test_the_end_of_the_engine_is_told_and_is_exit_code_1() -> None:
    async with program("--engine-restarts=0") as worker:
        async with stub_of(await worker.ready_line()) as stub:
            error = error_from_rpc(await rpc_error(stub.Decode(decode_request("die"))))
            assert error.reason == "engine_died"
            assert "told to" in error.message
        assert await worker.exit_code() == 1


async def test_a_model_that_cannot_be_used_is_exit_code_2() -> None:
    async with program("--model=missing") as worker:
        assert await worker.exit_code(20) == 2
        assert b"cannot start: missing is no model directory" in worker.log
        assert b"Traceback" not in worker.log


async def test_a_port_in_use_is_exit_code_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for flag in ("--port", "--metrics-port"):
            async with program(f"{flag}={port}") as worker:
                assert await worker.exit_code(20) == 2
                assert f"port {port} on 127.0.0.1 is in use".encode() in worker.log
                assert b"Traceback" not in worker.log


async def test_a_signal_during_the_start_is_obeyed() -> None:
    async with program("--model=slow") as worker:
        assert worker.process.stderr is not None
        async with asyncio.timeout(20):
            while b"configuration" not in await worker.process.stderr.readline():
                pass
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.exit_code() == 0


async def test_what_it_says_about_itself() -> None:
    async with program("--model=tiny", "--worker-id=d1") as worker:
        line = await worker.ready_line()
        channel = internal_channel(line["address"])
        stub = common_pb2_grpc.ServerStub(channel)
        info = await stub.GetServerInfo(common_pb2.GetServerInfoRequest(), timeout=10)
        await channel.close()
        assert info.worker_id == line["worker_id"] == "d1"
        assert info.pid == worker.process.pid
        assert info.config["worker_id"] == "d1"
        assert info.facts["num_blocks"] == "64"
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.exit_code() == 0


@pytest.mark.parametrize("module", ["tasuki.server.worker", "tasuki.client", "tasuki.metrics"])
def test_server_processes_do_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
