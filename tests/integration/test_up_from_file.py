"""`tasuki up` with real processes, from one YAML file and one GGUF file: every process gets its own
settings, and a prompt that was handed over continues as in one engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tasuki.client import Client
from tasuki.config import WorkerConfig
from tasuki.engine.engine import Engine
from tasuki.messages import SamplingParams
from tasuki.request import Request
from tests.convert.gguf_files import SPEC, original, write_gguf
from tests.integration.streams import Answer, ask, prompt

pytestmark = [pytest.mark.dist, pytest.mark.asyncio(loop_scope="session")]

CLUSTER = """\
up: {model: %s, port: 0, json: true}
worker:  # without compiled kernels, which a fresh cache would have to build
  native: false
  max-num-seqs: 7
  block_size: 8
  max_num_batched_tokens: 64
  kv_cache_memory: 8MiB
  max_waiting: 50
decode: {max_num_seqs: 5}
prefill: {handoff-timeout: 4}
router: {split_min_tokens: 10}
"""


@asynccontextmanager
async def up(cache: Path, *flags: str, **env: str) -> AsyncIterator[dict[str, Any]]:
    """A running `tasuki up`; what it said when it was ready."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli", "up", *flags,
        env=os.environ | {"TASUKI_CACHE": str(cache)} | env,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None, "asked for a pipe"
    try:
        async with asyncio.timeout(90):
            line = await process.stdout.readline()
        if not line:
            assert process.stderr is not None, "asked for a pipe"
            pytest.fail((await process.stderr.read()).decode())
        yield json.loads(line)
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.communicate(), 30)


async def settings(address: str) -> dict[str, str]:
    async with Client(address) as client:
        return dict((await client.server_info()).config)


async def ask_router(router: str) -> Answer:
    async with Client(router) as client:
        return await ask(client, prompt(100), max_tokens=24)


def alone(model: str) -> list[int]:
    """What one engine in this process answers."""
    engine = Engine.load(WorkerConfig(model=model, native=False, max_num_batched_tokens=64))
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    request = Request(1, "alone", prompt(100), sampling, frozenset(), 0.0)
    engine.add(request)
    while engine.has_work:
        engine.step()
    return request.output_token_ids


async def test_one_file_for_all_processes(tmp_path: Path) -> None:
    spec = dataclasses.replace(SPEC, qk_norm=True)  # a Qwen3
    model = write_gguf(tmp_path / "small.gguf", original(tmp_path / "original", spec), spec)
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER % model)
    flags = ("--config", str(file), "--block-size", "16")
    async with up(tmp_path / "cache", *flags, TASUKI_MAX_WAITING="99") as ready:
        found = {w["worker_id"]: await settings(w["address"]) for w in ready["workers"]}
        router = await settings(ready["router"])
        answer = await ask_router(ready["router"])
    prefill, decode = found["prefill-0"], found["decode-0"]
    assert (prefill["max_num_seqs"], decode["max_num_seqs"]) == ("7", "5")
    assert (prefill["handoff_timeout"], decode["handoff_timeout"]) == ("4.0", "5.0")
    assert router["split_min_tokens"] == "10"
    for each in (prefill, decode):
        assert each["kv_cache_memory"] == "8MiB"
        assert each["block_size"] == "16"  # a flag wins
        assert each["native"] == "False"
        assert each["max_waiting"] == "99"  # the environment too
        assert Path(each["model"]).parent == tmp_path / "cache" / "models"
    assert answer.placement.kind == "split"
    assert answer.token_ids == alone(decode["model"])
    assert len(set(answer.token_ids)) > 5
