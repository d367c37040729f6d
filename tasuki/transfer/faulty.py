"""A connector around another one, whose links can be slowed down, damaged or cut while they run.

For experiments and chaos tests: only a worker that was started with `--fault-injection` has one.
What it does to a segment is what a bad network does; everything else runs as it always does.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
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

Send = tuple[torch.Tensor, Completion]


class Faults:
    """What is wrong with all links of one worker, now. Any thread may ask and set."""

    def __init__(self, bytes_per_second: float = 0.0) -> None:
        self._lock = threading.Lock()
        self._bytes_per_second = bytes_per_second  # 0: as fast as it goes
        self._free_at = 0.0  # when what was sent before has gone through
        self._to_corrupt = 0
        self._channels: weakref.WeakSet[FaultyChannel] = weakref.WeakSet()

    def slow(self, bytes_per_second: float) -> None:
        """Let no more than so many bytes through, all links together; 0 ends it."""
        with self._lock:
            self._bytes_per_second = bytes_per_second
            self._free_at = 0.0

    def corrupt(self, segments: int) -> None:
        """Damage a byte of each of the next segments that arrive."""
        with self._lock:
            self._to_corrupt += segments

    def cut(self) -> int:
        """End the data connection of every link; how many there were."""
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            channel.close()
        return len(channels)

    def add(self, channel: FaultyChannel) -> None:
        with self._lock:
            self._channels.add(channel)

    def take_damage(self) -> bool:
        """Whether the segment that arrived is to be damaged."""
        with self._lock:
            if not self._to_corrupt:
                return False
            self._to_corrupt -= 1
            return True

    def delay(self, nbytes: int) -> float:
        """Seconds until `nbytes` more have gone through the link."""
        with self._lock:
            if not self._bytes_per_second:
                return 0.0
            now = monotonic()
            self._free_at = max(self._free_at, now) + nbytes / self._bytes_per_second
            return self._free_at - now


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
            until = monotonic() + self._faults.delay(nbytes)
            with self._changed:
                while not self._closed and (left := until - monotonic()) > 0:
                    self._changed.wait(left)
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
