"""A directory that appears complete or not at all, also when two processes make it at once.

Knows nothing about what is in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tasuki.clock import monotonic
from tasuki.errors import ModelError

POLL_SECONDS = 0.05
SUFFIX = 8  # characters that tempfile adds


@contextlib.contextmanager
def draft(directory: Path) -> Iterator[Path]:
    """An empty directory beside `directory`; it takes that name, replacing it, if the body
    succeeds.
    """
    with _writing(directory.parent):
        directory.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        yield work
        work.chmod(0o755)
        if directory.exists():
            # A directory cannot be replaced in one step unless it is empty: move the old one away.
            old = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
            os.replace(directory, old)
            os.replace(work, directory)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(work, directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Remove what killed processes left of `directory`: call it while holding its lock."""
    for left in directory.parent.glob(f".{glob.escape(directory.name)}.*"):
        if left.is_dir() and len(left.name) == len(f".{directory.name}.") + SUFFIX:
            shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def locked(directory: Path, seconds: float) -> Iterator[None]:
    """Hold the lock for making `directory`; it ends with this process, whatever happens to it.

    Raises ModelError when another process holds it for more than `seconds`.
    """
    file = directory.parent / f".{directory.name}.lock"
    deadline = monotonic() + seconds
    with _writing(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        opened = file.open("a")
    with opened as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if monotonic() > deadline:
                    raise ModelError(
                        f"another process has been making {directory} for {seconds:.0f} s; if none "
                        f"is, remove {file}"
                    ) from None
                time.sleep(POLL_SECONDS)  # flock has no deadline of its own
        yield  # closing the file releases the lock


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"{folder} cannot be written: {error.strerror}; set TASUKI_CACHE to a directory that "
            "can be"
        ) from None
