"""`tasuki up` with both roles on one GPU, and with a GPU each where there are two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasuki.client import Client
from tasuki.convert.tiny import make_tiny
from tests.integration.streams import Answer, ask, prompt
from tests.integration.test_up_from_file import up

pytestmark = [pytest.mark.gpu, pytest.mark.dist, pytest.mark.asyncio(loop_scope="session")]

COMMON = ("--port=0", "--json", "--dtype=float32", "--split-min-tokens=10")


async def answers(tmp_path: Path, *flags: str) -> list[Answer]:
    model = make_tiny(tmp_path / "tiny")
    async with (
        up(tmp_path / "cache", f"--model={model}", *COMMON, *flags) as ready,
        Client(ready["router"]) as client,
    ):
        return [await ask(client, prompt(length), max_tokens=24) for length in (100, 37, 16)]


async def test_both_roles_on_one_gpu(tmp_path: Path) -> None:
    for answer in await answers(tmp_path, "--device=cuda:0", "--connector=gloo"):
        assert answer.placement.kind == "split", "it fell back"
        assert len(answer.token_ids) == 24


async def test_a_gpu_each(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    file = tmp_path / "cluster.yaml"
    file.write_text("prefill: {device: 'cuda:0'}\ndecode: {device: 'cuda:1'}\n")
    for answer in await answers(tmp_path, f"--config={file}"):
        assert answer.placement.kind == "split", "it fell back"
        assert len(answer.token_ids) == 24
