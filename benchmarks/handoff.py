"""How fast KV is handed over on loopback, against raw TCP with the same bytes in the same run.

Two real processes on a core each; digests on, receives posted on announcement, as workers do it.
A TCP connection on loopback settles on a speed that the next one may miss by a factor of two, under
any congestion control; so the rounds are spread over several fresh pairs of both kinds.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch

from benchmarks.child import child
from benchmarks.link_ends import LAYOUT, Receiver, touched_cache
from benchmarks.machine import MIB, congestion_control, memcpy_speed
from benchmarks.pinning import own_cores, pinned
from benchmarks.raw_tcp import TcpReceiver
from benchmarks.rounds import Spread, interleave, ratios, share_out
from benchmarks.table import markdown, with_range
from tasuki.kv.cache import KVCache

SIZES = (8 * MIB, 64 * MIB)
ROUNDS = 20
PAIRS = 5
WARM_UP = 3  # rounds of each pair that do not count: TCP finds its window in them


@dataclass(frozen=True)
class SizeResult:
    nbytes: int
    handoff: Spread  # bytes per second
    tcp: Spread
    ratio: Spread  # of the rounds' own ratios


@dataclass(frozen=True)
class HandoffResult:
    sizes: tuple[SizeResult, ...]
    rounds: int
    pairs: int
    memcpy: float  # bytes per second
    congestion_control: str


@dataclass(frozen=True)
class Times:
    """Seconds of each round, of a number of blocks."""

    blocks: int
    handoff: list[float]
    tcp: list[float]

    def result(self) -> SizeResult:
        nbytes = self.blocks * LAYOUT.block_bytes
        return SizeResult(
            nbytes,
            Spread.of([nbytes / seconds for seconds in self.handoff]),
            Spread.of([nbytes / seconds for seconds in self.tcp]),
            Spread.of(ratios(self.tcp, self.handoff)),
        )


def measure(rounds: int = ROUNDS) -> HandoffResult:
    torch.set_num_threads(1)
    shares = share_out(rounds, PAIRS)
    times = [Times(-(-size // LAYOUT.block_bytes), [], []) for size in SIZES]
    core, far_core = own_cores()
    with pinned(core):
        cache = touched_cache()
        for share in shares:
            with fresh_pair(cache, far_core) as (receiver, tcp):
                for size in times:
                    _run_rounds(receiver, tcp, size, share)
        memcpy = memcpy_speed()
    sizes = tuple(size.result() for size in times)
    return HandoffResult(sizes, rounds, len(shares), memcpy, congestion_control())


@contextmanager
def fresh_pair(cache: KVCache, far_core: int) -> Iterator[tuple[Receiver, TcpReceiver]]:
    """An open link and an open TCP connection, each to a process of its own on `far_core`."""
    ours, theirs = socket.socketpair()
    tcp = TcpReceiver()
    descriptor = theirs.fileno()
    link_end = child("benchmarks.link_ends", str(descriptor), core=far_core, fds=(descriptor,))
    tcp_end = child("benchmarks.raw_tcp", str(tcp.port), core=far_core)
    with link_end, tcp_end, closing(tcp):
        theirs.close()
        with closing(Receiver(ours, cache)) as receiver:
            tcp.accept()
            receiver.open()
            yield receiver, tcp


def _run_rounds(receiver: Receiver, tcp: TcpReceiver, times: Times, rounds: int) -> None:
    blocks = times.blocks
    nbytes = blocks * LAYOUT.block_bytes
    found = interleave(
        {"handoff": lambda: receiver.receive(blocks), "tcp": lambda: tcp.receive(nbytes)},
        rounds,
        warm_up=WARM_UP,
    )
    times.handoff.extend(found["handoff"])
    times.tcp.extend(found["tcp"])


def report(result: HandoffResult) -> str:
    """Figures in GB/s; the ratio's median is the median of the rounds' own ratios."""
    rows = [
        [
            f"{size.nbytes / MIB:.1f} MiB",
            f"{size.handoff.median / 1e9:.2f}",
            f"{size.tcp.median / 1e9:.2f}",
            with_range(size.ratio),
        ]
        for size in result.sizes
    ]
    header = ["handed over", "handoff, GB/s", "raw TCP, GB/s", "ratio, median (range)"]
    notes = (
        f"{result.rounds} rounds over {result.pairs} fresh pairs of connections. Limit of this "
        f"machine: memcpy {result.memcpy / 1e9:.1f} GB/s. TCP congestion control of both: "
        f"{result.congestion_control}."
    )
    return f"### Handoff on loopback\n\n{markdown(header, rows)}\n\n{notes}"
