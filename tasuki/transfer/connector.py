"""How bytes move between two workers: the interface that every mechanism implements.

Knows nothing about requests, handoffs or block ids; only views of memory. Fixed now, so that
another mechanism (NCCL) is a file and not a rewrite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tasuki.errors import TransferError

Completion = Callable[[TransferError | None], None]
"""Called exactly once per ticket, on any thread: None when the bytes moved, else why they did
not.
"""


Launched = Callable[[], None]
"""Called once, on any thread, and before its ticket completes, unless that fails first."""


@dataclass(frozen=True)
class ChannelSpec:
    """Which end of which link a channel is."""

    link_id: str
    rank: int  # 0 sends KV (prefill), 1 receives it (decode)
    token_out: bytes  # 32 bytes: sent first on the new data connection
    token_in: bytes  # 32 bytes: must arrive first
    max_segment_bytes: int


class RendezvousStore(Protocol):
    """What a mechanism may use to find its peer: keys that ride the link's control stream."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, deadline: float) -> bytes:
        """Wait for the other side's key until `deadline` (monotonic). Raises TransferError."""


class Channel(Protocol):
    """One end of one open pair. Strictly FIFO in each direction; nothing can be cancelled."""

    needs_posted: bool  # a send may be launched only after the peer said Posted
    max_segment_bytes: int
    device: str
    digests: bool  # whether digests are the default for this mechanism

    def post_receive(
        self, view: torch.Tensor, done: Completion, launched: Launched | None = None
    ) -> None:
        """Receive the next message into `view` (uint8, 1-D, contiguous; exactly its size).

        `launched` tells when the peer's send may be launched where that `needs_posted`: a receive
        may have to queue behind those of other channels.
        """

    def send(self, view: torch.Tensor, done: Completion) -> None:
        """Send `view` (uint8, 1-D, contiguous), which must not change until `done`."""

    def close(self) -> None:
        """Fence: returns only when no byte can be written into our memory any more, and every
        ticket has completed or failed. Idempotent. Raises FenceLostError if it cannot promise it.
        """


class Connector(Protocol):
    name: str

    def open(self, spec: ChannelSpec, store: RendezvousStore, deadline: float) -> Channel:
        """Pair up with the peer. Blocks until `deadline` (monotonic). Raises TransferError."""
