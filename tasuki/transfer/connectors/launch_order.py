"""The one order in which a device's channels launch what they send and receive. Pure: no CUDA here.

Operations of several communicators on one device deadlock unless all devices launch them in orders
that agree, and a star of pairs has no such order. Hence one thread launches for all channels of a
device, and of each direction one operation is out at a time. A receive is launched, then the peer
is told, then its send is launched: so a receive that holds the slot waits only for a sender whose
own slot is held by something already moving. No cycle of waits can form.

An operation has ended when the device says so to the host, which asks again and again: nothing
blocks on it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from tasuki.clock import monotonic
from tasuki.errors import TransferError
from tasuki.transfer.connector import Completion, Launched

Direction = Literal["receive", "send"]
DIRECTIONS: tuple[Direction, ...] = ("receive", "send")
POLL = 0.0001  # seconds between two looks at what is out; a segment takes longer
CLOSED = "the channel is closed"


class Flight(Protocol):
    """An operation that was launched."""

    def has_ended(self) -> bool:
        """Whether the device will touch its memory no more. Raises RuntimeError if it is lost."""


@dataclass(eq=False)
class Operation:
    owner: object  # the channel
    launch: Callable[[], Flight]  # raises RuntimeError when nothing was launched
    done: Completion
    launched: Launched | None = None


class LaunchOrder:
    """First come, first served, in each direction. Its thread lives while there are channels."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._owners: set[object] = set()
        self._waiting: dict[Direction, deque[Operation]] = {d: deque() for d in DIRECTIONS}
        self._out: dict[Direction, Operation | None] = dict.fromkeys(DIRECTIONS)
        self._flights: dict[Direction, Flight] = {}  # touched by the thread alone
        self._retired: dict[object, list[Operation]] = {}
        self._thread: threading.Thread | None = None

    def enter(self, owner: object) -> None:
        """A channel opens."""
        with self._changed:
            self._owners.add(owner)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def submit(self, direction: Direction, operation: Operation) -> None:
        """Launch it in its turn. `done` is called once, here if the owner has retired."""
        with self._changed:
            is_open = operation.owner in self._owners
            if is_open:
                self._waiting[direction].append(operation)
                self._changed.notify_all()
        if not is_open:
            operation.done(TransferError(CLOSED))

    def retire(self, owner: object) -> None:
        """Nothing of this owner is launched any more; `settle` completes what it had."""
        with self._changed:
            self._owners.discard(owner)
            mine: list[Operation] = []
            for direction in DIRECTIONS:
                waiting = self._waiting[direction]
                mine += [operation for operation in waiting if operation.owner is owner]
                others = [operation for operation in waiting if operation.owner is not owner]
                self._waiting[direction] = deque(others)
            self._retired[owner] = mine
            self._changed.notify_all()

    def settle(self, owner: object, deadline: float) -> bool:
        """Wait for what a retired owner has out, then fail what it had waiting. False: the device
        has not ended it in time, and may still touch its memory.
        """
        with self._changed:
            ended = self._changed.wait_for(
                lambda: not self._is_out(owner), max(0.0, deadline - monotonic())
            )
            mine = self._retired.pop(owner, [])
        for operation in mine:
            operation.done(TransferError(CLOSED))
        return ended

    def _is_out(self, owner: object) -> bool:
        return any(out is not None and out.owner is owner for out in self._out.values())

    def _run(self) -> None:
        while self._wait():
            for direction in DIRECTIONS:
                self._look_at(direction)
                self._launch_next(direction)

    def _wait(self) -> bool:
        """Until there is something to do. False: no channel is left."""
        with self._changed:
            while not any(self._out.values()) and not any(self._waiting.values()):
                if not self._owners:
                    self._thread = None
                    return False
                self._changed.wait()
            if any(self._out.values()) and not self._may_launch():
                self._changed.wait(POLL)
            return True

    def _may_launch(self) -> bool:
        return any(self._waiting[d] and self._out[d] is None for d in DIRECTIONS)

    def _look_at(self, direction: Direction) -> None:
        flight, operation = self._flights.get(direction), self._out[direction]
        if flight is None or operation is None:
            return
        try:
            if not flight.has_ended():
                return
        except RuntimeError as error:
            # The device is lost. The slot stays taken, so that no fence is ever claimed.
            del self._flights[direction]
            operation.done(TransferError(f"the device failed: {error}"))
            return
        del self._flights[direction]
        with self._changed:
            is_open = operation.owner in self._owners
        operation.done(None if is_open else TransferError(CLOSED))
        self._free(direction)

    def _launch_next(self, direction: Direction) -> None:
        with self._changed:
            if self._out[direction] is not None or not self._waiting[direction]:
                return
            operation = self._waiting[direction].popleft()
            self._out[direction] = operation
        try:
            self._flights[direction] = operation.launch()
        except (RuntimeError, TransferError) as error:
            operation.done(TransferError(f"it was not launched: {error}"))
            self._free(direction)
            return
        if operation.launched is not None:
            operation.launched()

    def _free(self, direction: Direction) -> None:
        with self._changed:
            self._out[direction] = None
            self._changed.notify_all()
