"""A connector around another one, whose links can be slowed down, damaged or cut while they run.

For experiments and chaos tests: only a worker that was started with `--fault-injection` has one.
What it does to a segment is what a bad network does; everything else runs as it always does.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from tasuki.clock import monotonic
from tasuki.errors import TransferError
from tasuki.transfer.connector import (
    Channel,
    ChannelSpec,
    Completion,
    Connector,
    Launched,
    RendezvousStore,
)

LONGEST_WAIT = 3600.0  # seconds, at once

Send = tuple[torch.Tensor, Completion]


class Faults:
    """What is wrong with all links of one worker, now. Any thread may ask and set.

    A slow link is an odometer that runs at so many bytes per second: a segment is through when the
    odometer stands at its end. So a change of speed counts at once for what waits already.
    """

    def __init__(self, bytes_per_second: float = 0.0) -> None:
        self._changed = threading.Condition()
        self._bytes_per_second = bytes_per_second  # 0: as fast as it goes
        self._since = monotonic()  # when that speed was set
        self._passed = 0.0  # bytes that had gone through by then
        self._promised = 0.0  # where the odometer stands when all that waits has gone through
        self._to_corrupt = 0
        self._channels: weakref.WeakSet[FaultyChannel] = weakref.WeakSet()

    def slow(self, bytes_per_second: float) -> None:
        """Let no more than so many bytes through, all links together; 0 ends it. What waits feels
        it at once.
        """
        with self._changed:
            self._passed = self._odometer()
            self._since = monotonic()
            self._bytes_per_second = bytes_per_second
            if not bytes_per_second:
                self._promised = self._passed  # all that waits goes
            self._changed.notify_all()

    def corrupt(self, segments: int) -> None:
        """Damage a byte of each of the next segments that arrive."""
        with self._changed:
            self._to_corrupt += segments

    def cut(self) -> int:
        """End the data connection of every link; how many there were."""
        with self._changed:
            channels = list(self._channels)
        for channel in channels:
            channel.close()
        return len(channels)

    def add(self, channel: FaultyChannel) -> None:
        with self._changed:
            self._channels.add(channel)

    def take_damage(self) -> bool:
        """Whether the segment that arrived is to be damaged."""
        with self._changed:
            if not self._to_corrupt:
                return False
            self._to_corrupt -= 1
            return True

    def let_through(self, nbytes: int, given_up: Callable[[], bool]) -> None:
        """Return when `nbytes` more have gone through, or `given_up` holds: see `look_again`."""
        with self._changed:
            if not self._bytes_per_second:
                return
            end = self._promised = max(self._promised, self._odometer()) + nbytes
            while not given_up() and self._bytes_per_second and end > self._odometer():
                left = (end - self._odometer()) / self._bytes_per_second
                self._changed.wait(min(left, LONGEST_WAIT))
            if given_up():
                self._promised -= max(0.0, min(nbytes, end - self._odometer()))

    def look_again(self) -> None:
        """Somebody gave up."""
        with self._changed:
            self._changed.notify_all()

    def _odometer(self) -> float:
        return self._passed + (monotonic() - self._since) * self._bytes_per_second


class FaultyChannel:
    """Sends go through a queue and a thread of its own, so that they stay in order when slow."""

    def __init__(self, inner: Channel, faults: Faults, name: str) -> None:
        self.needs_posted = inner.needs_posted
        self.max_segment_bytes = inner.max_segment_bytes
        self.device = inner.device
        self.digests = inner.digests
        self._inner = inner
        self._faults = faults
        self._queue: deque[Send] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._pace, name=name, daemon=True)
        self._thread.start()
        faults.add(self)

    def post_receive(
        self, view: torch.Tensor, done: Completion, launched: Launched | None = None
    ) -> None:
        self._inner.post_receive(view, partial(self._arrived, view, done), launched)

    def send(self, view: torch.Tensor, done: Completion) -> None:
        with self._changed:
            if not self._closed:
                self._queue.append((view, done))
                self._changed.notify()
                return
        done(TransferError("the channel is closed"))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            waiting = list(self._queue)
            self._queue.clear()
            self._changed.notify()
        self._faults.look_again()
        self._inner.close()
        for _, done in waiting:
            done(TransferError("the channel was closed"))

    def _arrived(self, view: torch.Tensor, done: Completion, error: TransferError | None) -> None:
        if error is None and self._faults.take_damage():
            view[view.numel() // 2] ^= 0xFF
        done(error)

    def _pace(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._queue)
                if self._closed:
                    return
                nbytes = self._queue[0][0].numel()
            self._faults.let_through(nbytes, lambda: self._closed)
            with self._changed:
                if self._closed:
                    return
                view, done = self._queue.popleft()
                self._inner.send(view, done)


class FaultyConnector:
    def __init__(self, inner: Connector, faults: Faults) -> None:
        self.name = inner.name
        self.faults = faults
        self._inner = inner

    def open(self, spec: ChannelSpec, store: RendezvousStore, deadline: float) -> Channel:
        channel = self._inner.open(spec, store, deadline)
        return FaultyChannel(channel, self.faults, f"pace-{spec.link_id[:8]}-{spec.rank}")
