"""Two ranks of torch's ProcessGroupNCCL on one device each, one communicator per link.

The only file that calls NCCL. It cannot run without a GPU: `tests/gpu` does. What it relies on:
* the group is built directly, without `init_process_group`; its first operation makes the
  communicator, of which rank 0 passes an id through the store;
* one communicator and one stream of torch's serve both directions of a pair;
* `Work.synchronize()` orders the current stream behind the operation, and the host goes on. An
  event recorded there has happened when the kernel has ended, finished or aborted: that is all
  that is ever asked. `wait()` and `is_completed()` are not used: one may block, and the other
  counts an error as an end;
* torch's own timers and handlers are off: they abort, or end the process, when they see fit.
"""

from __future__ import annotations

import math
import os
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined] # torch exports it, unlisted

from tasuki.clock import monotonic
from tasuki.errors import TransferError
from tasuki.transfer.connector import ChannelSpec, RendezvousStore

CTAS = 2  # NCCL's channels per link: each has buffers of its own
LIBRARY_BYTES = 64 << 20  # of the device per link: a guess from above; tests/gpu measures it
NEVER = timedelta(days=1)  # torch's timeout; ours are the link's
TORCH_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}


class IdStore(Store):
    """Carries the communicator's id while the pair opens; afterwards it answers from memory, since
    torch's threads may look into it for as long as the group lives.
    """

    def __init__(self, store: RendezvousStore, deadline: float) -> None:
        super().__init__()
        self._store: RendezvousStore | None = store
        self._deadline = deadline
        self._values: dict[str, bytes] = {}

    def seal(self) -> None:
        self._store = None

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override] # the stub says str; C++ passes bytes
        self._values[key] = bytes(value)
        if self._store is not None:
            self._store.set("nccl/" + key, bytes(value))

    def get(self, key: str) -> bytes:
        if key not in self._values:
            if self._store is None:
                raise TransferError(f"NCCL asks for key {key!r} after the link opened")
            self._values[key] = self._store.get("nccl/" + key, self._deadline)
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, value: int) -> int:
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = str(total).encode()
        return total


class EventFlight:
    """Ends with an event behind the operation's kernel."""

    def __init__(self, event: torch.cuda.Event, work: object) -> None:
        self._event = event
        self._work = work  # keeps the tensor, as torch does for those who wait

    def has_ended(self) -> bool:
        # torch does not annotate `query`
        ended: bool = self._event.query()  # type: ignore[no-untyped-call]
        return ended


class DevicePair:
    def __init__(self, group: Any, store: IdStore, device: torch.device, peer: int) -> None:
        self._group = group
        self._store = store  # torch's reference alone would not keep the Python half of it
        self._device = device
        self._peer = peer
        # Nothing else is ever on these, so that no operation queues behind a step.
        self._sending, self._receiving = make_stream(device), make_stream(device)

    def send(self, view: torch.Tensor) -> EventFlight:
        return self._launch(self._group.send, view, self._sending)

    def receive(self, view: torch.Tensor) -> EventFlight:
        return self._launch(self._group.recv, view, self._receiving)

    def load(self, content: bytes) -> torch.Tensor:
        with torch.cuda.stream(self._sending):
            view = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._device)
        self._sending.synchronize()
        return view

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def read(self, view: torch.Tensor) -> bytes:
        with torch.cuda.stream(self._receiving):
            return bytes(view.cpu().numpy())

    def opened(self) -> None:
        self._store.seal()

    def abort(self) -> None:
        self._group.abort()

    def _launch(self, call: Any, view: torch.Tensor, stream: torch.cuda.Stream) -> EventFlight:
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            work = call([view], self._peer, 0)
            work.synchronize()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return EventFlight(event, work)


def make_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def make_group(store: Store, rank: int, size: int, seconds: float) -> Any:
    """A ProcessGroupNCCL with non-blocking communicators. `seconds` bounds their first meeting."""
    from torch.distributed import ProcessGroupNCCL  # only a build with CUDA has it

    os.environ.update(TORCH_SETTINGS)
    # torch reads it once per process; without it a missing peer would hold a lock for half an hour
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(max(1, math.ceil(seconds))))
    os.environ.setdefault("NCCL_MAX_P2P_NCHANNELS", str(CTAS))
    options = ProcessGroupNCCL.Options()
    options._timeout = NEVER
    options.config.blocking = 0
    options.config.min_ctas = 1
    options.config.max_ctas = CTAS
    return ProcessGroupNCCL(store, rank, size, options)


def open_device_pair(
    spec: ChannelSpec, store: RendezvousStore, device: torch.device, deadline: float
) -> DevicePair:
    """Does not wait for the peer: the first operation does."""
    keys = IdStore(store, deadline)
    with torch.cuda.device(device):
        group = make_group(keys, spec.rank, 2, deadline - monotonic())
    return DevicePair(group, keys, device, 1 - spec.rank)
