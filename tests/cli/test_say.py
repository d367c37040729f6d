"""Words at the terminal."""

from __future__ import annotations

import io
import sys

import pytest

from cli.say import say, show


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("out", "shown"), [(Terminal(), "a\n\tb�[2Jé�"), (io.StringIO(), None)])
def test_a_terminal_gets_no_control_characters(out: io.StringIO, shown: str | None) -> None:
    text = "a\n\tb\x1b[2Jé\x9b"
    show(text, out)
    assert out.getvalue() == (shown or text)


def test_a_closed_terminal_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    say("words")
