"""The pipe whose end tells children that their parent is gone, however it went.

The parent alone holds the write end and never writes. When the parent ends, by SIGKILL too, the
kernel closes it, and every child that watches the read end exits by itself.
"""

from __future__ import annotations

import os


class Lifeline:
    """One pipe for all children of one owner. `close` is the owner's way to let them go."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        self._closed = False

    def close(self) -> None:
        """Close both ends; a second call does nothing."""
        if not self._closed:
            self._closed = True
            os.close(self._write_fd)
            os.close(self.read_fd)
