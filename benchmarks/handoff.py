"""How fast KV is handed over on loopback, against raw TCP with the same bytes in the same run.

Two real processes on a core each; digests on, receives posted on announcement, as workers do it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.link_ends import LAYOUT, Receiver
from benchmarks.machine import MIB, memcpy_speed
from benchmarks.raw_tcp import TcpReceiver
from benchmarks.rounds import Spread, interleave, ratios
from benchmarks.table import markdown

SIZES = (8 * MIB, 64 * MIB)
ROUNDS = 20


@dataclass(frozen=True)
class HandoffResult:
    nbytes: int
    handoff: Spread  # bytes per second
    tcp: Spread
    ratio: Spread


@contextmanager
def child(module: str, argument: str, *, core: int, fds: tuple[int, ...] = ()) -> Iterator[None]:
    """A process of ours on one core, ended with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, argument],
        pass_fds=fds,
        preexec_fn=partial(os.sched_setaffinity, 0, {core}),
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


def measure(rounds: int = ROUNDS) -> list[HandoffResult]:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = socket.socketpair()
    tcp = TcpReceiver()
    link_end = child(
        "benchmarks.link_ends", str(theirs.fileno()), core=cores[-1], fds=(theirs.fileno(),)
    )
    tcp_end = child("benchmarks.raw_tcp", str(tcp.port), core=cores[-1])
    with link_end, tcp_end:
        theirs.close()
        os.sched_setaffinity(0, {cores[0]})
        try:
            tcp.accept()
            receiver = Receiver(ours)
            receiver.open()
            return [_measure_size(receiver, tcp, size, rounds) for size in SIZES]
        finally:
            os.sched_setaffinity(0, cores)
            tcp.close()
            ours.close()


def _measure_size(receiver: Receiver, tcp: TcpReceiver, size: int, rounds: int) -> HandoffResult:
    blocks = -(-size // LAYOUT.block_bytes)
    nbytes = blocks * LAYOUT.block_bytes
    times = interleave(
        {"handoff": lambda: receiver.receive(blocks), "tcp": lambda: tcp.receive(nbytes)},
        rounds,
        warm_up=3,
    )
    return HandoffResult(
        nbytes,
        Spread.of([nbytes / seconds for seconds in times["handoff"]]),
        Spread.of([nbytes / seconds for seconds in times["tcp"]]),
        Spread.of(ratios(times["tcp"], times["handoff"])),
    )


def report(results: list[HandoffResult], rounds: int = ROUNDS) -> str:
    """Figures in GB/s; the ratio's median is the median of the rounds' own ratios."""
    rows = [
        [
            f"{result.nbytes / MIB:.1f} MiB",
            f"{result.handoff.median / 1e9:.2f}",
            f"{result.tcp.median / 1e9:.2f}",
            f"{result.ratio.median:.2f} ({result.ratio.low:.2f} to {result.ratio.high:.2f})",
        ]
        for result in results
    ]
    header = ["handed over", "handoff, GB/s", "raw TCP, GB/s", "ratio, median (range)"]
    limit = f"memcpy of this machine: {memcpy_speed() / 1e9:.1f} GB/s; {rounds} rounds."
    return f"### Handoff on loopback\n\n{markdown(header, rows)}\n\n{limit}"
