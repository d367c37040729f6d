"""What stands in for NCCL on a CPU: pairs whose bytes move when both ends have launched.

Strict where NCCL would hang or spoil memory: sizes must be equal, and the order of a pair's own
operations is the order in which they meet.
"""

from __future__ import annotations

import threading
from collections import deque

import torch

from tasuki.transfer.connector import ChannelSpec, RendezvousStore


class FakeFlight:
    def __init__(self) -> None:
        self.ended = False
        self.lost = False

    def has_ended(self) -> bool:
        if self.lost:
            raise RuntimeError("an illegal memory access was encountered")
        return self.ended


class Wire:
    """What two ends share: launched operations by the rank that receives."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sends: dict[int, deque[tuple[torch.Tensor, FakeFlight]]] = {0: deque(), 1: deque()}
        self.receives: dict[int, deque[tuple[torch.Tensor, FakeFlight]]] = {0: deque(), 1: deque()}
        self.stuck = False  # nothing moves any more
        self.deaf = False  # nor does an abort help

    def move(self) -> None:
        for rank in (0, 1):
            sends, receives = self.sends[rank], self.receives[rank]
            while sends and receives and not self.stuck:
                (source, sent), (target, received) = sends.popleft(), receives.popleft()
                target.copy_(source)
                sent.ended = received.ended = True


class FakePair:
    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire = wire
        self.rank = rank
        self.flights: list[FakeFlight] = []
        self.is_open = False

    def send(self, view: torch.Tensor) -> FakeFlight:
        return self._launch(self.wire.sends[1 - self.rank], view)

    def receive(self, view: torch.Tensor) -> FakeFlight:
        return self._launch(self.wire.receives[self.rank], view)

    def load(self, content: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def read(self, view: torch.Tensor) -> bytes:
        return bytes(view.numpy())

    def opened(self) -> None:
        self.is_open = True

    def abort(self) -> None:
        """Ends this side's own operations, and only those: the peer's go on waiting."""
        with self.wire.lock:
            if not self.wire.deaf:
                self.wire.stuck = True
                for flight in self.flights:
                    flight.ended = True

    def _launch(
        self, queue: deque[tuple[torch.Tensor, FakeFlight]], view: torch.Tensor
    ) -> FakeFlight:
        with self.wire.lock:
            flight = FakeFlight()
            self.flights.append(flight)
            queue.append((view, flight))
            self.wire.move()
            return flight


class FakeNccl:
    """Opens fake pairs by link id, for `NcclConnector(open_pair=...)`."""

    def __init__(self) -> None:
        self.wires: dict[str, Wire] = {}
        self.pairs: list[FakePair] = []
        self._lock = threading.Lock()

    def open_pair(
        self, spec: ChannelSpec, store: RendezvousStore, device: torch.device, deadline: float
    ) -> FakePair:
        with self._lock:
            pair = FakePair(self.wires.setdefault(spec.link_id, Wire()), spec.rank)
            self.pairs.append(pair)
        return pair
