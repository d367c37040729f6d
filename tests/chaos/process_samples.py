"""What the processes of a cluster hold: memory, descriptors and threads, sampled from /proc."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from cli.cluster.local_cluster import LocalCluster
from tests.chaos.flatness import Series, growth_per_hour, rise

MIB = 1 << 20
MEMORY_BOUND = 16 * MIB  # per hour
MEMORY_SHARE = 0.05  # of what a process holds, per hour, where that is more
# How far the maximum of descriptors or threads may rise by chance. Quiet: connections to a metrics
# page come and go. With faults: a worker has two links, each with six descriptors and about as many
# threads, and for a moment after a cut their successors beside them; whether a sample sees that is
# chance. In half an hour, a leak of one a minute makes 15 from the second quarter to the last.
QUIET_SLACK, SLACK = 4, 12


@dataclass
class ProcessSamples:
    """One process's series, and what is wrong with them."""

    pid: int
    memory: list[tuple[float, float]] = field(default_factory=list)  # resident bytes
    descriptors: list[tuple[float, float]] = field(default_factory=list)
    threads: list[tuple[float, float]] = field(default_factory=list)

    def take(self, at: float) -> None:
        """Raises OSError when the process is gone."""
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines()
        )
        self.memory.append((at, int(status["VmRSS"].split()[0]) * 1024.0))
        self.threads.append((at, float(status["Threads"])))
        self.descriptors.append((at, float(len(os.listdir(f"/proc/{self.pid}/fd")))))

    def problems(self, slack: int) -> list[str]:
        found = []
        growth = growth_per_hour(self.memory)
        if growth > memory_bound(self.memory):
            found.append(f"its memory grows by {growth / MIB:.1f} MiB an hour")
        for what, series in (("descriptors", self.descriptors), ("threads", self.threads)):
            if rise(series) > slack:
                found.append(f"{rise(series):.0f} more {what} in the last quarter than before")
        return found

    def describe(self) -> str:
        levels = [statistics.median(v for _, v in series) for series in (
            self.memory, self.descriptors, self.threads,
        )]  # fmt: skip
        return (
            f"{levels[0] / MIB:6.1f} MiB {growth_per_hour(self.memory) / MIB:+7.2f} an hour, "
            f"{levels[1]:3.0f} descriptors {rise(self.descriptors):+3.0f}, "
            f"{levels[2]:3.0f} threads {rise(self.threads):+3.0f}"
        )


def memory_bound(memory: Series) -> float:
    """Bytes that a process may grow by in an hour."""
    return max(MEMORY_BOUND, MEMORY_SHARE * statistics.median(value for _, value in memory))


def processes_of(cluster: LocalCluster) -> dict[str, ProcessSamples]:
    """By name: the servers and engines of all workers, and the routers."""
    found = {
        f"router-{number} server": ProcessSamples(router.pid)
        for number, router in enumerate(cluster.routers)
    }
    for worker in cluster.workers:
        found[f"{worker.worker_id} server"] = ProcessSamples(worker.pid)
        found[f"{worker.worker_id} engine"] = ProcessSamples(worker.engine_pid)
    return found


async def keep_sampling(processes: dict[str, ProcessSamples], seconds: float) -> None:
    """One sample of each process every so many seconds, for ever."""
    began = time.monotonic()
    while True:
        for process in processes.values():
            process.take(time.monotonic() - began)
        await asyncio.sleep(seconds)
