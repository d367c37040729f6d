"""KV within one process: a connector for tests, embedding and benchmarks, strict where it can be.

Both ends open through the same `LoopbackConnector` object. A send may be launched only after the
receive was posted, sizes must be equal, and a fault policy may drop, damage or hold segments.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch

from tasuki.clock import monotonic
from tasuki.errors import FenceLostError, TransferError
from tasuki.transfer.connector import (
    Channel,
    ChannelSpec,
    Completion,
    Launched,
    RendezvousStore,
)
from tasuki.transfer.connectors.loopback_fault import Fault, NoFault, Verdict

CLOSE_DEADLINE = 2.0  # seconds; a delivery is one memory copy


@dataclass(frozen=True, eq=False)
class Ticket:
    view: torch.Tensor
    done: Completion


class Pair:
    """What the two ends share: one lock, and per receiving rank one queue of each kind."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.changed = threading.Condition()
        self.closed: str | None = None
        self.sends: dict[int, deque[Ticket]] = {0: deque(), 1: deque()}
        self.receives: dict[int, deque[Ticket]] = {0: deque(), 1: deque()}
        self.lost: dict[int, list[Ticket]] = {0: [], 1: []}  # receives whose segment was dropped
        self.threads: list[threading.Thread] = []
        fault.attach(self.wake)

    def wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def close(self, reason: str) -> None:
        with self.changed:
            if self.closed is None:
                self.closed = reason
            self.changed.notify_all()


class LoopbackChannel:
    """One end. Its own thread delivers what arrives here, and calls both sides' completions."""

    needs_posted = True
    device = "cpu"
    digests = True

    def __init__(self, pair: Pair, spec: ChannelSpec) -> None:
        self.max_segment_bytes = spec.max_segment_bytes
        self._pair = pair
        self._rank = spec.rank
        self._index = 0
        name = f"loopback-{spec.link_id[:8]}-{spec.rank}"
        thread = threading.Thread(target=self._deliver, name=name, daemon=True)
        with pair.changed:
            pair.threads.append(thread)
        thread.start()

    def post_receive(
        self, view: torch.Tensor, done: Completion, launched: Launched | None = None
    ) -> None:
        with self._pair.changed:
            reason = self._pair.closed
            if reason is None:
                if launched is not None:
                    launched()
                self._pair.receives[self._rank].append(Ticket(view, done))
                self._pair.changed.notify_all()
        if reason is not None:
            done(TransferError(f"the channel is closed: {reason}"))

    def send(self, view: torch.Tensor, done: Completion) -> None:
        peer, pair = 1 - self._rank, self._pair
        with pair.changed:
            reason = pair.closed
            if reason is None and len(pair.sends[peer]) >= len(pair.receives[peer]):
                reason = pair.closed = "a send was launched before its receive was posted"
            if reason is None:
                pair.sends[peer].append(Ticket(view, done))
            pair.changed.notify_all()
        if reason is not None:
            done(TransferError(f"the channel is closed: {reason}"))

    def close(self) -> None:
        """Closes both ends. A delivery holds the lock while it copies: that is the fence.

        The peer's thread completes our sends, so both threads must have ended.
        """
        self._pair.close("this side or the peer closed it")
        deadline = monotonic() + CLOSE_DEADLINE
        for thread in list(self._pair.threads):
            assert thread is not threading.current_thread(), "a completion closed its channel"
            thread.join(max(0.0, deadline - monotonic()))
            if thread.is_alive():
                raise FenceLostError(f"{thread.name} did not stop within {CLOSE_DEADLINE} s")

    def _deliver(self) -> None:
        while (step := self._next()) is not None:
            tickets, error = step
            for ticket in tickets:
                ticket.done(error)
        for ticket in self._drain():
            ticket.done(TransferError(f"the channel is closed: {self._pair.closed}"))

    def _next(self) -> tuple[list[Ticket], TransferError | None] | None:
        """Move the next segment; which tickets completed and how. None: closed."""
        pair = self._pair
        sends, receives = pair.sends[self._rank], pair.receives[self._rank]
        with pair.changed:
            while pair.closed is None:
                verdict = Verdict.HOLD
                if sends and receives:
                    verdict = pair.fault.verdict(self._index)
                if verdict is not Verdict.HOLD:
                    return self._move(sends.popleft(), receives.popleft(), verdict)
                pair.changed.wait()
            return None

    def _move(
        self, sent: Ticket, posted: Ticket, verdict: Verdict
    ) -> tuple[list[Ticket], TransferError | None]:
        self._index += 1
        if sent.view.numel() != posted.view.numel():
            self._pair.closed = (
                f"a send of {sent.view.numel()} bytes met a receive of {posted.view.numel()}"
            )
            return [sent, posted], TransferError(self._pair.closed)
        if verdict is Verdict.DROP:
            self._pair.lost[self._rank].append(posted)
            return [sent], None
        posted.view.copy_(sent.view)
        if verdict is Verdict.FLIP:
            posted.view[posted.view.numel() // 2] ^= 0xFF
        return [sent, posted], None

    def _drain(self) -> list[Ticket]:
        pair = self._pair
        with pair.changed:
            kinds = (pair.lost[self._rank], pair.receives[self._rank], pair.sends[self._rank])
            tickets = [ticket for kind in kinds for ticket in kind]
            for kind in kinds:
                kind.clear()
            return tickets


class LoopbackConnector:
    """Pairs two ends by link id. `fault` decides what happens to each segment."""

    name = "loopback"

    def __init__(self, fault: Fault | None = None) -> None:
        self._fault = fault or NoFault()
        self._changed = threading.Condition()
        self._waiting: dict[str, dict[int, ChannelSpec]] = {}
        self._pairs: dict[str, Pair] = {}

    def open(self, spec: ChannelSpec, store: RendezvousStore, deadline: float) -> Channel:
        """Keys in `store` tell each side that the other is here; then both take the same pair."""
        store.set(f"loopback/{spec.rank}", spec.token_out)
        token = store.get(f"loopback/{1 - spec.rank}", deadline)
        if token != spec.token_in:
            raise TransferError(f"link {spec.link_id}: the peer's one-time token does not match")
        return LoopbackChannel(self._meet(spec, deadline), spec)

    def _meet(self, spec: ChannelSpec, deadline: float) -> Pair:
        with self._changed:
            ends = self._waiting.setdefault(spec.link_id, {})
            if spec.rank in ends:
                raise TransferError(f"link {spec.link_id} has an end of rank {spec.rank} already")
            ends[spec.rank] = spec
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(ends) == 2, deadline - monotonic()):
                self._waiting.pop(spec.link_id, None)
                raise TransferError(
                    f"link {spec.link_id}: the other end is not in this process; loopback needs "
                    "both workers to share one LoopbackConnector"
                )
            self._waiting.pop(spec.link_id, None)
            pair = self._pairs.pop(spec.link_id, None)
            if pair is None:
                pair = self._pairs[spec.link_id] = Pair(self._fault)
            return pair
