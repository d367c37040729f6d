"""What lies between two sides that a test drives: streams and a channel, delivered one item at a
time by whoever asks. Nothing here knows what the messages mean.

A stream keeps its own order and no other; when it is cut, what was behind is lost and its reader
is told of the end. Bytes move only when `move` is called, from whatever the sender's memory holds
then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import torch

from tasuki.errors import TransferError
from tasuki.transfer.connector import Channel, ChannelSpec, Completion, Launched, RendezvousStore

M = TypeVar("M")


@dataclass(eq=False)
class Stream(Generic[M]):
    """One direction; `read` gets each message in order, `ended` comes once, after the last."""

    read: Callable[[M], None]
    ended: Callable[[], None]
    waiting: deque[Callable[[], None]] = field(default_factory=deque)
    open: bool = True
    gone: bool = False  # its reader died

    def put(self, message: M) -> None:
        if self.open and not self.gone:
            self.waiting.append(partial(self.read, message))

    def cut(self, keep: int) -> None:
        """At most `keep` of what is on its way still arrives, then the end."""
        if self.open and not self.gone:
            while len(self.waiting) > keep:
                self.waiting.pop()
            self.waiting.append(self.ended)
        self.open = False

    def lose_reader(self) -> None:
        self.waiting.clear()
        self.gone = True

    def deliver(self) -> None:
        self.waiting.popleft()()


class Wire:
    """The two ends of one channel. A fence fails this side's tickets and wakes nobody else's."""

    def __init__(self) -> None:
        self.sends: deque[tuple[torch.Tensor, Completion]] = deque()
        self.receives: deque[tuple[torch.Tensor, Completion]] = deque()
        self.closed = False

    @property
    def can_move(self) -> bool:
        return bool(self.sends and self.receives) and not self.closed

    def move(self) -> None:
        """The oldest segment arrives, and both sides learn of it."""
        (source, sent), (target, received) = self.sends.popleft(), self.receives.popleft()
        assert source.numel() == target.numel()
        target.copy_(source)
        sent(None)
        received(None)


class End:
    """One side's end of a wire: a Channel."""

    needs_posted = True
    device = "cpu"
    digests = True

    def __init__(self, wire: Wire, rank: int, max_segment_bytes: int) -> None:
        self.max_segment_bytes = max_segment_bytes
        self._wire = wire
        self._own = wire.receives if rank else wire.sends

    def post_receive(
        self, view: torch.Tensor, done: Completion, launched: Launched | None = None
    ) -> None:
        self._take(view, done)
        if launched is not None and not self._wire.closed:
            launched()

    def send(self, view: torch.Tensor, done: Completion) -> None:
        assert self._wire.closed or len(self._wire.sends) < len(self._wire.receives)
        self._take(view, done)

    def _take(self, view: torch.Tensor, done: Completion) -> None:
        if self._wire.closed:
            done(TransferError("the channel is closed"))
        else:
            self._own.append((view, done))

    def close(self) -> None:
        self._wire.closed = True
        while self._own:
            self._own.popleft()[1](TransferError("the channel is closed"))


class Wires:
    """A connector: one wire per link, up at once."""

    name = "loopback"

    def __init__(self) -> None:
        self.by_link: dict[str, Wire] = {}

    def open(self, spec: ChannelSpec, store: RendezvousStore, deadline: float) -> Channel:
        wire = self.by_link.setdefault(spec.link_id, Wire())
        return End(wire, spec.rank, spec.max_segment_bytes)
