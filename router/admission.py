"""The bounded queue in which requests wait for a placement. Pure: takes `now`, returns data.

The policy at its head is explicit: strictly first come, first placed. A large request at the head
is never overtaken, so none starves; the price is that it holds back smaller ones meanwhile.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from tasuki.errors import QueueFullError

T = TypeVar("T")


@dataclass(eq=False)
class Entry(Generic[T]):
    """One waiting request. `arrived` and `deadline` are seconds on the caller's clock."""

    item: T
    arrived: float
    deadline: float
    waiting: bool = True


class AdmissionQueue(Generic[T]):
    """First in, first out, at most `limit` entries, each with a deadline of its own."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: deque[Entry[T]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def offer(self, item: T, *, now: float, deadline: float) -> Entry[T]:
        """Join at the end. Raises QueueFullError when `limit` requests wait already."""
        if len(self._entries) >= self._limit:
            raise QueueFullError(
                f"{len(self._entries)} requests wait in this router already, which is its limit "
                "(--max-queue); try again later"
            )
        entry = Entry(item, arrived=now, deadline=deadline)
        self._entries.append(entry)
        return entry

    def offer_again(self, entry: Entry[T]) -> None:
        """Put back, at the head, an entry whose placement did not hold. It keeps its deadline.

        Never refused: it was let in once, and at most the placed requests can come back.
        """
        assert not entry.waiting
        entry.waiting = True
        self._entries.appendleft(entry)

    def head(self) -> Entry[T] | None:
        return self._entries[0] if self._entries else None

    def take(self) -> Entry[T]:
        """Remove the head: it was placed or rejected."""
        entry = self._entries.popleft()
        entry.waiting = False
        return entry

    def withdraw(self, entry: Entry[T]) -> None:
        """Remove an entry wherever it stands: its caller went away. Idempotent."""
        if entry.waiting:
            self._entries.remove(entry)
            entry.waiting = False

    def expire(self, now: float) -> list[Entry[T]]:
        """Remove and return the entries whose deadline has passed, oldest first."""
        late = [entry for entry in self._entries if entry.deadline <= now]
        if late:
            self._entries = deque(entry for entry in self._entries if entry.deadline > now)
            for entry in late:
                entry.waiting = False
        return late

    def next_deadline(self) -> float | None:
        """When `expire` will next have something to do; None when nothing waits."""
        return min((entry.deadline for entry in self._entries), default=None)

    def oldest_waiting(self, now: float) -> float:
        """Seconds that the longest waiting entry has waited; 0 when nothing waits."""
        return max((now - entry.arrived for entry in self._entries), default=0.0)
