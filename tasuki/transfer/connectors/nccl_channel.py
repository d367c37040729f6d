"""One open NCCL pair as a `Channel`: every message goes through its device's `LaunchOrder`.

Knows no torch.distributed: what moves the bytes is a `Pair`, so that all of this is tried without a
GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from tasuki.clock import monotonic
from tasuki.errors import FenceLostError
from tasuki.transfer.connector import ChannelSpec, Completion, Launched
from tasuki.transfer.connectors.launch_order import Flight, LaunchOrder, Operation

FENCE_DEADLINE = 5.0  # seconds, of the control thread; an abort is said to take some milliseconds


class Pair(Protocol):
    """Two ranks that move bytes. Operations return at once and are polled."""

    def send(self, view: torch.Tensor) -> Flight: ...

    def receive(self, view: torch.Tensor) -> Flight: ...

    def load(self, content: bytes) -> torch.Tensor:
        """Bytes in memory that can be sent."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory that can be received into, and that nothing else will write."""

    def read(self, view: torch.Tensor) -> bytes: ...

    def opened(self) -> None:
        """Both ends have met: the store is not needed any more."""

    def abort(self) -> None:
        """Make what is under way end. May block."""


class NcclChannel:
    needs_posted = True
    digests = False

    def __init__(
        self,
        pair: Pair,
        spec: ChannelSpec,
        device: str,
        order: LaunchOrder,
        closed: Callable[[], None],
    ) -> None:
        """`closed` is called once, when the channel's memory is free again."""
        self.max_segment_bytes = spec.max_segment_bytes
        self.device = device
        self._name = f"nccl-{spec.link_id[:8]}-{spec.rank}"
        self._pair = pair
        self._order = order
        self._closed = closed
        self._is_closed = False
        order.enter(self)

    def post_receive(
        self, view: torch.Tensor, done: Completion, launched: Launched | None = None
    ) -> None:
        launch = partial(self._pair.receive, view)
        self._order.submit("receive", Operation(self, launch, done, launched))

    def send(self, view: torch.Tensor, done: Completion) -> None:
        self._order.submit("send", Operation(self, partial(self._pair.send, view), done))

    def close(self) -> None:
        """Abort, then wait until the device has ended every kernel of this pair."""
        if self._is_closed:
            return
        self._is_closed = True
        deadline = monotonic() + FENCE_DEADLINE
        self._order.retire(self)
        aborted = abort(self._pair, self._name, deadline)
        if not self._order.settle(self, deadline) or not aborted:
            raise FenceLostError(
                f"{self._name}: NCCL did not let go of a pair within {FENCE_DEADLINE} s; its "
                "memory may still be written, so this process must exit"
            )
        self._closed()


def abort(pair: Pair, name: str, deadline: float) -> bool:
    """Whether the library let go in time. On a thread of its own: should it block for ever, the
    caller still learns of it.
    """
    thread = threading.Thread(target=pair.abort, name=f"{name}-abort", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - monotonic()))
    return not thread.is_alive()
