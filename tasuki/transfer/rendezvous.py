"""The store two channel ends find each other with: keys that ride the link's control stream.

The opener thread sets and gets; the control thread delivers what the peer set. Knows no mechanism.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from tasuki.clock import monotonic
from tasuki.errors import TransferError

MAX_KEYS = 64
MAX_VALUE_BYTES = 64 << 10


class ControlStreamStore:
    """Implements `RendezvousStore`. Both sides' keys share one name space, as in any store."""

    def __init__(self, publish: Callable[[str, bytes], None]) -> None:
        self._publish = publish  # called on the opener thread
        self._values: dict[str, bytes] = {}
        self._cancelled: str | None = None
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()
        self._publish(key, value)

    def get(self, key: str, deadline: float) -> bytes:
        with self._changed:
            while key not in self._values:
                if self._cancelled is not None:
                    raise TransferError(f"the link was closed while it opened: {self._cancelled}")
                left = deadline - monotonic()
                if left <= 0:
                    raise TransferError(
                        f"the peer did not send rendezvous key {key!r} in time; is it alive, and "
                        "is its host reachable?"
                    )
                self._changed.wait(left)
            return self._values[key]

    def deliver(self, key: str, value: bytes) -> None:
        """Take a key that the peer set. Raises TransferError for an absurd one."""
        with self._changed:
            if len(value) > MAX_VALUE_BYTES or len(self._values) >= MAX_KEYS:
                raise TransferError(
                    f"the peer sent rendezvous key {key[:80]!r} of {len(value)} bytes after "
                    f"{len(self._values)} others; the limits are {MAX_VALUE_BYTES} and {MAX_KEYS}"
                )
            self._values[key] = value
            self._changed.notify_all()

    def cancel(self, reason: str) -> None:
        """Fail every wait, now and later."""
        with self._changed:
            self._cancelled = reason
            self._changed.notify_all()
