"""Signals: the first stops in order, the next at once; and the end of the parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.interrupts import run_interruptible
from tasuki.errors import ConfigError, ModelError

ROOT = Path(__file__).resolve().parents[2]


async def test_the_first_signal_lets_the_work_clean_up() -> None:
    steps: list[str] = []

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        try:
            await asyncio.sleep(30)
        finally:
            steps.append("cleaned")

    assert await run_interruptible(work(), lambda: steps.append("killed")) == 0
    assert steps == ["cleaned"]


async def test_the_second_signal_cuts_the_cleaning_short() -> None:
    killed = asyncio.Event()

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(30)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(killed.wait(), 10)

    assert await run_interruptible(work(), killed.set) == 130


async def test_an_error_of_the_work_is_raised() -> None:
    async def work() -> None:
        raise ModelError("no")

    with pytest.raises(ModelError):
        await run_interruptible(work(), lambda: None)


async def test_an_ignored_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:

        async def work() -> None:
            os.kill(os.getpid(), signal.SIGHUP)

        assert await run_interruptible(work(), lambda: None) == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_dying_with_a_parent_that_is_gone_is_refused() -> None:
    # In a process of its own: the request to the kernel stays for the life of the process.
    code = "import os; from cli.interrupts import die_with_parent; die_with_parent(os.getpid())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ConfigError.__name__ in done.stderr
    assert "may have ended already" in done.stderr


async def test_an_ignored_ctrl_c_still_counts() -> None:
    # A shell script that starts us with & has it ignored; what is sent to us by name is meant.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:

        async def work() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(30)

        assert await asyncio.wait_for(run_interruptible(work(), lambda: None), 10) == 0
    finally:
        signal.signal(signal.SIGINT, before)
