"""What digests, heartbeats and the lease cost a handoff, in percent of its throughput.

The same bytes, in the same segments and within the same window, go over the same open channel
between two real processes on a core each: once as a worker's link does it by default, once with
nothing around it (receives posted in advance, segments sent, one message to start it), and with
single things left out. The contenders take turns of half a second, so that heartbeats come as often
as they do in a worker, and every other round runs them in reverse; a pair is a round's two turns.

The few control messages take the shortest way here and not gRPC's: that is work of other processes,
and of latency. What the two ends of a link do is what is measured.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.child import child
from benchmarks.cost_ends import Arm, CostReceiver
from benchmarks.interval import Cost
from benchmarks.link_ends import LAYOUT, Receiver, touched_cache
from benchmarks.machine import MIB
from benchmarks.pinning import own_cores, pinned
from benchmarks.rounds import Spread, interleave, ratios, share_out
from benchmarks.table import markdown
from tasuki.kv.cache import KVCache

ROUNDS = 30
PAIRS = 15  # fresh pairs of processes; two rounds each, one in each order
WARM_UP = 1
LIMIT = 5.0  # percent: where the upper end of the interval should stay below
TURN_BYTES = 1024 * MIB

# 22 MiB are the demo model's prompt of 1,000 tokens in bfloat16: 63 blocks of half the size.
BLOCKS = tuple(-(-nbytes // LAYOUT.block_bytes) for nbytes in (22 * MIB, 64 * MIB))

FULL = Arm(sender_digests=True, receiver_digests=True, heartbeats=True, lease=True)
NO_DIGESTS = replace(FULL, sender_digests=False, receiver_digests=False)
LEASE_ONLY = replace(NO_DIGESTS, heartbeats=False)
ARMS = {
    "no digests": NO_DIGESTS,
    "full": FULL,
    "bare": replace(LEASE_ONLY, lease=False),
    "no heartbeats": replace(FULL, heartbeats=False),
    "lease only": LEASE_ONLY,
    "sender digests": replace(NO_DIGESTS, sender_digests=True),
    "receiver digests": replace(NO_DIGESTS, receiver_digests=True),
}

# What is asked: the throughput of the first against that of the second.
QUESTIONS = {
    "all": ("full", "bare"),
    "digests": ("full", "no digests"),
    "the sender's": ("sender digests", "no digests"),
    "the receiver's": ("receiver digests", "no digests"),
    "heartbeats": ("full", "no heartbeats"),
    "lease": ("lease only", "bare"),
}


@dataclass(frozen=True)
class SizeResult:
    nbytes: int  # of one handoff
    speeds: dict[str, Spread]  # bytes per second, by arm
    costs: dict[str, Cost]  # by question

    @property
    def is_below_limit(self) -> bool:
        return self.costs["all"].high < LIMIT


@dataclass(frozen=True)
class HandoffCostResult:
    sizes: tuple[SizeResult, ...]
    rounds: int
    pairs: int
    turn_bytes: int


def measure(
    rounds: int = ROUNDS, sizes: Sequence[int] = BLOCKS, turn_bytes: int = TURN_BYTES
) -> HandoffCostResult:
    """`sizes` are blocks of one handoff; a turn is as many of them as make `turn_bytes`."""
    torch.set_num_threads(1)
    shares = share_out(rounds, PAIRS)
    found: dict[int, dict[str, list[float]]] = {
        blocks: {name: [] for name in ARMS} for blocks in sizes
    }
    core, far_core = own_cores()
    with pinned(core):
        cache = touched_cache()
        for share in shares:
            with fresh_link(cache, far_core) as receiver:
                for blocks, speeds in found.items():
                    _run_rounds(receiver, blocks, turn_bytes, share, speeds)
    results = tuple(_result(blocks, speeds) for blocks, speeds in found.items())
    return HandoffCostResult(results, rounds, len(shares), turn_bytes)


@contextmanager
def fresh_link(cache: KVCache, far_core: int) -> Iterator[CostReceiver]:
    """An open link to a process of its own on `far_core`."""
    ours, theirs = socket.socketpair()
    descriptor = theirs.fileno()
    with child("benchmarks.cost_ends", str(descriptor), core=far_core, fds=(descriptor,)):
        theirs.close()
        with closing(Receiver(ours, cache)) as receiver:
            receiver.open()
            with closing(CostReceiver(receiver)) as taking_turns:
                yield taking_turns


def _run_rounds(
    receiver: CostReceiver,
    blocks: int,
    turn_bytes: int,
    rounds: int,
    speeds: Mapping[str, list[float]],
) -> None:
    """Add to each arm's speeds, bytes per second."""
    nbytes = blocks * LAYOUT.block_bytes
    times = max(1, turn_bytes // nbytes)
    turns = {name: partial(receiver.turn, arm, blocks, times) for name, arm in ARMS.items()}
    for name, seconds in interleave(turns, rounds, warm_up=WARM_UP).items():
        speeds[name].extend(times * nbytes / one for one in seconds)


def _result(blocks: int, speeds: Mapping[str, list[float]]) -> SizeResult:
    return SizeResult(
        blocks * LAYOUT.block_bytes,
        {name: Spread.of(values) for name, values in speeds.items()},
        {
            name: Cost.of(ratios(speeds[given], speeds[without]))
            for name, (given, without) in QUESTIONS.items()
        },
    )


def report(result: HandoffCostResult) -> str:
    """Throughputs in GB/s, medians; costs in percent, with their intervals."""
    header = ["handed over", "as it is, GB/s", "bare, GB/s", *QUESTIONS, f"all below {LIMIT:g} %"]
    rows = [
        [
            f"{size.nbytes / MIB:.1f} MiB",
            f"{size.speeds['full'].median / 1e9:.2f}",
            f"{size.speeds['bare'].median / 1e9:.2f}",
            *(_percent(size.costs[name]) for name in QUESTIONS),
            "yes" if size.is_below_limit else "no",
        ]
        for size in result.sizes
    ]
    notes = (
        f"Costs in percent of throughput, with 95% intervals of {result.rounds} interleaved pairs "
        f"over {result.pairs} connections; a turn moves {result.turn_bytes / MIB:.0f} MiB."
    )
    return f"### Cost of a handoff\n\n{markdown(header, rows)}\n\n{notes}"


def _percent(cost: Cost) -> str:
    return f"{cost.mean:.1f} ({cost.low:.1f} to {cost.high:.1f})"
