"""Ending a group of processes whole, its leader gone or not."""

from __future__ import annotations

import subprocess
import sys

from cli.cluster.process_group import end_group, group_members

# Starts one more process that ignores SIGTERM, says so, and leaves or waits.
LEADER = """\
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork():
    sys.stdin.read()
else:
    print("two", flush=True)
    signal.pause()
"""


def leader() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", LEADER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "two\n"
    return process


async def test_the_whole_group_ends() -> None:
    with leader() as process:
        assert len(group_members(process.pid)) == 2
        assert await end_group(process.pid, 10) == []
        assert group_members(process.pid) == []


async def test_what_the_leader_left_behind_ends_too() -> None:
    with leader() as process:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=10)
        assert len(group_members(process.pid)) == 1
        assert await end_group(process.pid, 10) == []


async def test_a_group_that_is_gone_is_fine() -> None:
    with leader() as process:
        await end_group(process.pid, 10)
        process.wait(timeout=10)
        assert await end_group(process.pid, 10) == []
