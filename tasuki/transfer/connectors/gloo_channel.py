"""One open gloo pair as a `Channel`: two FIFO lanes, each with a thread that waits for its tickets.

Nothing ever depends on a wait returning: `close` fences the pair first, then fails every ticket.
"""

from __future__ import annotations

import threading
from collections import deque
from datetime import timedelta
from queue import SimpleQueue
from typing import Protocol

import torch
from torch.distributed import Work

from tasuki.clock import monotonic
from tasuki.errors import FenceLostError, TransferError
from tasuki.transfer.connector import ChannelSpec, Completion, Launched

DATA_TAG = 0
FENCE_TAG = 2  # nothing is ever sent on it
FENCE_DEADLINE = 2.0  # seconds; measured: 11-40 ms


class GlooGroup(Protocol):
    """What is used of ProcessGroupGloo; torch's stubs leave these two out."""

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work: ...

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work: ...


class Ticket:
    """Completes exactly once, whoever comes first: the waiter or the fence."""

    def __init__(self, view: torch.Tensor, done: Completion) -> None:
        self.view = view  # keeps the memory alive as long as gloo may touch it
        self._done = done
        self._lock = threading.Lock()
        self._finished = False

    def finish(self, error: TransferError | None) -> None:
        """Holds the lock during `done`, so that a fence returns after it and not within it."""
        with self._lock:
            if not self._finished:
                self._finished = True
                self._done(error)


class Lane:
    """The tickets of one direction, waited for in order by one daemon thread.

    The thread owns a reference to each Work until its wait returned (dropping it before wedges the
    pair) and to the group, which is destroyed after the last lane ended.
    """

    def __init__(self, group: GlooGroup, name: str, stall: float) -> None:
        self._queue: SimpleQueue[tuple[Ticket, Work] | None] = SimpleQueue()
        self._open: deque[Ticket] = deque()
        self._lock = threading.Lock()  # of `_open`
        self._stall = timedelta(seconds=stall)
        args = (group,)
        self._thread = threading.Thread(target=self._run, args=args, name=name, daemon=True)
        self._thread.start()

    def add(self, ticket: Ticket, work: Work) -> None:
        with self._lock:
            self._open.append(ticket)
        self._queue.put((ticket, work))

    def stop(self, error: TransferError) -> None:
        """Fail what is open, oldest first; the thread ends when its last wait returns."""
        with self._lock:
            tickets = list(self._open)
        for ticket in tickets:
            ticket.finish(error)
        self._queue.put(None)

    def _run(self, group: GlooGroup) -> None:
        while (entry := self._queue.get()) is not None:
            ticket, work = entry
            error: TransferError | None = None
            try:
                work.wait(self._stall)
            except RuntimeError as failure:
                error = TransferError(f"gloo: {failure}")
            ticket.finish(error)
            with self._lock:
                self._open.popleft()
            del entry, ticket, work  # or this frame keeps views alive while the lane is idle


class GlooChannel:
    needs_posted = False
    device = "cpu"
    digests = True

    def __init__(self, group: GlooGroup, spec: ChannelSpec, stall: float) -> None:
        self.max_segment_bytes = spec.max_segment_bytes
        self._peer = 1 - spec.rank
        self._group: GlooGroup | None = group
        name = f"gloo-{spec.link_id[:8]}-{spec.rank}"
        self._receives = Lane(group, f"{name}-receive", stall)
        self._sends = Lane(group, f"{name}-send", stall)

    def post_receive(
        self, view: torch.Tensor, done: Completion, launched: Launched | None = None
    ) -> None:
        ticket = Ticket(view, done)
        if self._group is None:
            ticket.finish(TransferError("the channel is closed"))
            return
        try:
            work = self._group.recv([view], self._peer, DATA_TAG)
        except RuntimeError as error:  # the pair is closed already
            ticket.finish(TransferError(f"gloo: {error}"))
        else:
            if launched is not None:
                launched()
            self._receives.add(ticket, work)

    def send(self, view: torch.Tensor, done: Completion) -> None:
        ticket = Ticket(view, done)
        if self._group is None:
            ticket.finish(TransferError("the channel is closed"))
            return
        try:
            work = self._group.send([view], self._peer, DATA_TAG)
        except RuntimeError as error:
            ticket.finish(TransferError(f"gloo: {error}"))
        else:
            self._sends.add(ticket, work)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        fence(group, self._peer)
        error = TransferError("the channel was closed")
        self._receives.stop(error)
        self._sends.stop(error)


def fence(group: GlooGroup, peer: int) -> None:
    """Close the pair locally. An expired wait does it, and takes the lock that every read holds.

    Proof is that the pair refuses the next receive at once. Raises FenceLostError.
    """
    deadline = monotonic() + FENCE_DEADLINE
    refused = threading.Event()

    def expire() -> None:
        scrap = torch.zeros(1, dtype=torch.uint8)
        while monotonic() < deadline:
            try:
                work = group.recv([scrap], peer, FENCE_TAG)
            except RuntimeError:
                refused.set()
                return
            try:
                work.wait(timedelta(milliseconds=1))
            except RuntimeError:
                continue

    # A thread of its own: should gloo block for ever, the caller still learns of the lost fence.
    thread = threading.Thread(target=expire, name="gloo-fence", daemon=True)
    thread.start()
    if not refused.wait(FENCE_DEADLINE):
        raise FenceLostError(
            f"gloo did not close a pair within {FENCE_DEADLINE} s; its memory may still be "
            "written, so this process must exit"
        )
    thread.join()
