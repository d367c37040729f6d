"""The requests that hold no blocks, in the order in which they are admitted. Knows nothing about
blocks or budgets.

Those that were preempted stand at the head. Behind them the order is that of arrival in the queue
(fcfs), or of arrival + priority * ageing: as everyone ages alike, that key is fixed when a request
is pushed, and a request can be overtaken only by those that arrive less than ageing times the
levels of priority between them after it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator

from tasuki.request import Request
from tasuki.scheduler.config import QueueOrder, SchedulerConfig

_Place = tuple[float, int]


class WaitingQueue:
    def __init__(self, config: SchedulerConfig) -> None:
        self._by_priority = config.queue_order is QueueOrder.PRIORITY
        self._ageing = config.priority_ageing
        self._resuming: deque[Request] = deque()
        self._places: list[_Place] = []  # sorted; `_queue` runs beside it
        self._queue: list[Request] = []
        self._place_of: dict[int, _Place] = {}
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._resuming) + len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        yield from self._resuming
        yield from self._queue

    @property
    def num_resuming(self) -> int:
        """Requests that lost their blocks and wait to get them back."""
        return len(self._resuming)

    def push(self, request: Request) -> None:
        self._pushed += 1
        rank = request.arrived + request.priority * self._ageing if self._by_priority else 0.0
        place = (rank, self._pushed)
        index = bisect_left(self._places, place)
        self._places.insert(index, place)
        self._queue.insert(index, request)
        self._place_of[request.key] = place

    def push_front(self, request: Request) -> None:
        """Ahead of everyone: it ran before."""
        self._resuming.appendleft(request)

    def remove(self, request: Request) -> None:
        place = self._place_of.pop(request.key, None)
        if place is None:
            self._resuming.remove(request)
            return
        index = bisect_left(self._places, place)
        del self._places[index], self._queue[index]

    def check_integrity(self) -> None:
        assert self._places == sorted(self._places)
        assert [self._place_of[request.key] for request in self._queue] == self._places
        assert len(self._place_of) == len(self._queue)
