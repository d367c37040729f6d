"""KV between GPUs over NCCL: one two-rank communicator per link, opened and fenced by itself.

Like gloo's connector it pairs over the link's control stream and proves with one-time tokens that
the data connection leads to the same peer. Unlike gloo it launches on a device: see `launch_order`.
Links are counted, because each takes memory of the device that the KV cache then lacks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from tasuki.clock import monotonic
from tasuki.errors import FenceLostError, TransferError
from tasuki.transfer.connector import Channel, ChannelSpec, RendezvousStore
from tasuki.transfer.connectors.launch_order import Flight, LaunchOrder
from tasuki.transfer.connectors.nccl_channel import FENCE_DEADLINE, NcclChannel, Pair, abort
from tasuki.transfer.connectors.nccl_pair import LIBRARY_BYTES, open_device_pair

TOKEN_BYTES = 32
TOKEN_POLL = 0.001  # seconds
OpenPair = Callable[[ChannelSpec, RendezvousStore, torch.device, float], Pair]


def link_bytes(window_bytes: int, segment_bytes: int) -> int:
    """What one link takes of its device: a ring for blocks that lie apart, scratch for segments
    that nobody wants any more, and NCCL's own buffers.
    """
    return window_bytes + segment_bytes + segment_bytes + LIBRARY_BYTES


class NcclConnector:
    """Opens at most `max_links` pairs of one device at a time."""

    name = "nccl"

    def __init__(
        self, device: torch.device, max_links: int, open_pair: OpenPair = open_device_pair
    ) -> None:
        self._device = device
        self._max_links = max_links
        self._open_pair = open_pair
        self._order = LaunchOrder(f"nccl-launch-{device}")
        self._links = 0
        self._lock = threading.Lock()  # of `_links`

    def open(self, spec: ChannelSpec, store: RendezvousStore, deadline: float) -> Channel:
        """Raises TransferError: no peer in time, another peer, too many links, or NCCL's reason."""
        self._take_place(spec)
        try:
            pair = self._pair_up(spec, store, deadline)
        except BaseException:
            self._give_place()
            raise
        return NcclChannel(pair, spec, str(self._device), self._order, self._give_place)

    def _take_place(self, spec: ChannelSpec) -> None:
        with self._lock:
            if self._links >= self._max_links:
                raise TransferError(
                    f"link {spec.link_id}: this worker has {self._links} NCCL links, and room was "
                    "kept for no more; start it with a larger --nccl-links"
                )
            self._links += 1

    def _give_place(self) -> None:
        with self._lock:
            self._links -= 1

    def _pair_up(self, spec: ChannelSpec, store: RendezvousStore, deadline: float) -> Pair:
        """On a thread of its own: NCCL has no deadline, so an abort must be able to come."""
        name = f"nccl-{spec.link_id[:8]}-{spec.rank}"
        try:
            pair = self._open_pair(spec, store, self._device, deadline)
        except RuntimeError as error:
            raise _not_opened(spec, str(error)) from error
        problems: list[str] = []
        meet = partial(_meet, pair, spec, deadline, problems)
        thread = threading.Thread(target=meet, name=f"{name}-meet", daemon=True)
        thread.start()
        thread.join(max(0.0, deadline - monotonic()))
        met = not thread.is_alive()
        if met and not problems:
            pair.opened()
            return pair
        fenced_by = monotonic() + FENCE_DEADLINE
        aborted = abort(pair, name, fenced_by)
        thread.join(max(0.0, fenced_by - monotonic()))
        if not aborted or thread.is_alive():
            raise FenceLostError(
                f"{name}: NCCL did not let go of a pair that never opened; this process must exit"
            )
        raise _not_opened(spec, problems[0] if problems else "the peer did not come in time")


def _not_opened(spec: ChannelSpec, problem: str) -> TransferError:
    return TransferError(
        f"link {spec.link_id}: no NCCL pair: {problem}; check that both hosts can reach each other "
        "and that the two workers have a GPU each, or start both with --connector gloo"
    )


def _meet(pair: Pair, spec: ChannelSpec, deadline: float, problems: list[str]) -> None:
    """Exchange tokens, rank 0 first: two messages of one communicator need one order."""
    try:
        arrived = pair.empty(TOKEN_BYTES)
        sends = partial(pair.send, pair.load(spec.token_out))
        receives = partial(pair.receive, arrived)
        for launch in (sends, receives) if spec.rank == 0 else (receives, sends):
            if not _ended(launch(), deadline):
                problems.append("no one-time token came over the data connection in time")
                return
        if pair.read(arrived) != spec.token_in:
            problems.append("a wrong one-time token came over the data connection")
    except (RuntimeError, TransferError) as error:
        problems.append(str(error))


def _ended(flight: Flight, deadline: float) -> bool:
    while not flight.has_ended():
        if monotonic() >= deadline:
            return False
        time.sleep(TOKEN_POLL)
    return True
