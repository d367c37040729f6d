"""Words for the person at the terminal: our own go to stderr, for stdout carries results only."""

from __future__ import annotations

import contextlib
import sys
import unicodedata
from typing import TextIO


def say(text: str) -> None:
    """Print one message to stderr. A terminal that was closed meanwhile is not an error."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def show(text: str, out: TextIO) -> None:
    """Print a piece of a model's answer at once; exactly as it is, unless to a terminal.

    There, control characters other than line breaks and tabs are replaced: a model may produce any
    sequence, and a terminal obeys some of them.
    """
    if out.isatty():
        text = "".join("\ufffd" if _is_control(char) else char for char in text)
    print(text, end="", file=out, flush=True)


def _is_control(char: str) -> bool:
    return char not in "\n\t" and unicodedata.category(char) == "Cc"
