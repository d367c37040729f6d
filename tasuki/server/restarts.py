"""How often an engine that died may be started again. Pure: takes `now`, in seconds."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 60.0


class RestartBudget:
    """At most `limit` restarts within any `window` seconds: what dies more often stays dead, and
    whoever runs the process decides.
    """

    def __init__(self, limit: int, window: float = WINDOW_SECONDS) -> None:
        self.limit = limit
        self.window = window
        self._taken: deque[float] = deque()

    def take(self, now: float) -> bool:
        """Whether one more may be made; it counts as made then."""
        while self._taken and now - self._taken[0] >= self.window:
            self._taken.popleft()
        if len(self._taken) >= self.limit:
            return False
        self._taken.append(now)
        return True
