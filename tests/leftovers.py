"""What a test may leave behind in its process: nothing. Takes and compares snapshots of it.

Linux only: reads /proc. Looked at: child processes, threads, sockets, pipes and other open
descriptors, and /dev/shm.
Tolerated, because they belong to the process and not to a test:
* multiprocessing's resource tracker: one child for the life of the process, with one pipe;
* daemon threads of libraries, unless their name says that they are ours (`tasuki`);
* epoll and event descriptors of gRPC's own poller (at most 8), which the library keeps for reuse;
* open regular files and devices: what an import or a cached model maps is no leak of the test.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path

POLLER_DESCRIPTORS = 8
POLLER_KINDS = ("anon_inode:[eventpoll]", "anon_inode:[eventfd]")
SETTLE_SECONDS = 3.0

_adopted: set[int] = set()  # children of something that lives longer than the test


def adopt(pid: int) -> None:
    """A child that a test started in place of another one, within a cluster that outlives it."""
    _adopted.add(pid)


@dataclass(frozen=True)
class Leftovers:
    """What is there: process ids with their command, threads, descriptors with their target."""

    children: dict[int, str] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)
    descriptors: dict[str, str] = field(default_factory=dict)
    pollers: int = 0
    shared_memory: frozenset[str] = frozenset()

    def since(self, before: Leftovers) -> list[str]:
        """What is here and was not there before, one line each. Empty: nothing."""
        found = [
            f"child process {pid}: {command}"
            for pid, command in self.children.items()
            if pid not in before.children
        ]
        found += [
            f"thread {name}" for key, name in self.threads.items() if key not in before.threads
        ]
        found += [
            f"descriptor {target}"
            for key, target in self.descriptors.items()
            if key not in before.descriptors
        ]
        if self.pollers > before.pollers + POLLER_DESCRIPTORS:
            found.append(f"{self.pollers - before.pollers} epoll and event descriptors")
        found += [f"/dev/shm/{name}" for name in self.shared_memory - before.shared_memory]
        return found


def look() -> Leftovers:
    """Take a snapshot of this process."""
    targets = _descriptors()
    return Leftovers(
        children=_children(),
        threads={
            thread.ident or 0: thread.name
            for thread in threading.enumerate()
            if not thread.daemon or "tasuki" in thread.name
        },
        descriptors={
            f"{number} {target}": target
            for number, target in targets.items()
            if target not in POLLER_KINDS and not target.startswith("/")
        },
        pollers=sum(target in POLLER_KINDS for target in targets.values()),
        shared_memory=_shared_memory(),
    )


def settle(before: Leftovers, seconds: float = SETTLE_SECONDS) -> list[str]:
    """What is left after at most `seconds`: ends as soon as nothing is.

    An object that waits for the garbage collector is not a leak, so it is run before the verdict.
    """
    until = time.monotonic() + seconds
    while found := look().since(before):
        if time.monotonic() >= until:
            return found
        gc.collect()
        time.sleep(0.01)
    return []


def _children() -> dict[int, str]:
    me = os.getpid()
    children = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it ended while we looked
            stat = Path(entry.path, "stat").read_text()
            if int(stat.rpartition(")")[2].split()[1]) != me:
                continue
            command = Path(entry.path, "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if "resource_tracker" not in command and int(entry.name) not in _adopted:
                children[int(entry.name)] = command.strip() or "(a zombie nobody waited for)"
    return children


def _descriptors() -> dict[int, str]:
    targets = {}
    tracker = getattr(resource_tracker._resource_tracker, "_fd", None)
    for entry in os.listdir("/proc/self/fd"):
        if entry == str(tracker):
            continue
        with contextlib.suppress(OSError):  # the one that this listing itself used
            targets[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
    return targets


def _shared_memory() -> frozenset[str]:
    try:
        return frozenset(os.listdir("/dev/shm"))
    except OSError:
        return frozenset()
