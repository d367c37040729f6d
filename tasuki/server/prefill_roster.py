"""The prefill workers that routers name: their union, for a decode worker's engine. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasuki.messages import PrefillTarget

FORGET_SECONDS = 30.0


@dataclass(frozen=True)
class _Named:
    target: PrefillTarget
    at: float


class PrefillRoster:
    """Takes `now`, in seconds. The latest word on a worker_id counts, whoever said it."""

    def __init__(self, forget_after: float = FORGET_SECONDS) -> None:
        self._forget_after = forget_after
        self._named: dict[str, _Named] = {}

    def name(self, targets: Sequence[PrefillTarget], now: float) -> bool:
        """A router names these; whether the union changed."""
        before = self.workers
        for target in targets:
            self._named[target.worker_id] = _Named(target, now)
        self._forget(now)
        return self.workers != before

    def expire(self, now: float) -> bool:
        """Drop what no router has named for too long; whether the union changed."""
        before = len(self._named)
        self._forget(now)
        return len(self._named) != before

    @property
    def workers(self) -> list[PrefillTarget]:
        """The union, ordered by worker_id."""
        return [self._named[worker_id].target for worker_id in sorted(self._named)]

    def _forget(self, now: float) -> None:
        self._named = {
            worker_id: named
            for worker_id, named in self._named.items()
            if now - named.at < self._forget_after
        }
