"""The inherited pipe whose end means that the parent is gone, however it went.

It is watched by a thread of its own, because it must work even when the event loop is busy.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable


class Lifeline:
    """Calls `on_end` on its thread when the pipe closes, then `force` if still open after `grace`.

    Owns the descriptor from `start` on; `close` returns it and the thread.
    """

    def __init__(
        self,
        fd: int,
        on_end: Callable[[], None],
        *,
        grace: float,
        force: Callable[[], None],
    ) -> None:
        self._fd = fd
        self._on_end = on_end
        self._grace = grace
        self._force = force
        self._closing, self._close = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="tasuki-lifeline", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop watching and return the descriptors. Idempotent."""
        if self._close < 0:
            return
        os.close(self._close)
        self._close = -1
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        os.close(self._closing)
        os.close(self._fd)

    def _watch(self) -> None:
        while True:
            readable, _, _ = select.select([self._fd, self._closing], [], [])
            if self._closing in readable:
                return
            if not os.read(self._fd, 4096):
                break  # what a parent writes is no sign of its end
        self._on_end()
        readable, _, _ = select.select([self._closing], [], [], self._grace)
        if not readable:
            self._force()
