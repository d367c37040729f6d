"""Skips this folder, with its reason, where there is no GPU; TASUKI_REQUIRE=gpu makes it fail.

CUDA is started before any test is looked at for leftovers: what it keeps belongs to the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from tests.require import require

ROOT = Path(__file__).resolve().parents[2]
Apart: TypeAlias = Callable[..., str]


@pytest.fixture(scope="session", autouse=True)
def gpu() -> torch.device:
    require("gpu", torch.cuda.is_available(), "torch finds no CUDA device here")
    torch.zeros(1, device="cuda:0")
    return torch.device("cuda", 0)


@pytest.fixture(scope="session", autouse=True)
def nccl_devices(gpu: torch.device) -> tuple[str, str] | None:
    """Where the two ranks of a pair may be; None: this machine and NCCL have no place for both."""
    if torch.cuda.device_count() > 1:
        return ("cuda:0", "cuda:1")
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ("cuda:0", "cuda:0") if version >= (2, 30) else None


@pytest.fixture
def apart() -> Apart:
    """Runs a function of a test module in a process of its own, since NCCL keeps threads and
    descriptors, and an aborted communicator is best left behind; returns what it printed.
    """

    def run(function: Callable[..., None], *arguments: str, seconds: float = 100) -> str:
        code = (
            f"import sys; from {function.__module__} import {function.__name__} as run; "
            "run(*sys.argv[1:])"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=seconds,
        )  # fmt: skip
        print(done.stdout)
        assert done.returncode == 0, done.stderr[-6000:]
        return done.stdout

    return run
