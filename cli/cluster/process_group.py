"""Who lives in a process group, and how to end it whole. Linux: reads /proc.

A child is started as the leader of its own group, so that what it starts itself (an engine, a
download) can be ended with it even after the leader is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path


def group_members(pgid: int) -> list[int]:
    """Process ids in the group that still run; zombies only wait to be reaped and do not count."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it ended while we looked
            # The name in parentheses may hold anything, so split after the last one.
            state, _, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == pgid and state not in "ZX":
                members.append(int(entry.name))
    return members


def kill_group(pgid: int) -> None:
    """SIGKILL every process of the group; one that is gone already is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pgid, signal.SIGKILL)


async def end_group(pgid: int, deadline: float) -> list[int]:
    """Kill what is left of a group and wait, `deadline` seconds at most, until nothing runs there.

    Returns the process ids that are still there after the deadline.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + deadline
    while members := group_members(pgid):
        kill_group(pgid)
        if loop.time() >= until:
            return members
        await asyncio.sleep(0.02)
    return []
