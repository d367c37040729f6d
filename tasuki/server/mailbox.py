"""A queue with one reader that takes everything at once: one wake-up per frame, not per item."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """For one event loop. Unbounded: what goes in is bounded by its writer's own protocol."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, items: Iterable[T]) -> None:
        """Add items and wake the reader once."""
        self._items.extend(items)
        if self._items:
            self._filled.set()

    async def take(self) -> list[T]:
        """Wait for at least one item; returns all that are there, in order."""
        await self._filled.wait()
        self._filled.clear()
        items, self._items = self._items, []
        return items
