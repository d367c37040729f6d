"""Turns a stream of token ids into a stream of text, without ever taking a character back.

The pieces put together are exactly the text of all ids. Costs time linear in the number of tokens:
each push decodes a short window, whose front is dropped once what follows no longer depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasuki.text.tokenizer import Tokenizer

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
LONGEST_CHARACTER = 4  # bytes in UTF-8; a token that is kept in the window has at least one
WINDOW = 16


class IncrementalDetokenizer:
    """Text of one request's output, as it becomes certain."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that were returned

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these tokens: never part of a character."""
        visible = [id_ for id_ in token_ids if id_ not in self._tokenizer.special_ids]
        if not visible:
            return ""
        self._window += visible
        if visible[-1] in self._tokenizer.byte_ids:
            return ""  # a run of byte tokens is valid, or not, as a whole
        text = self._tokenizer.decode(self._window)
        certain = text.removesuffix(UNKNOWN)  # perhaps a character that is not complete yet
        new, self._given = certain[self._given :], max(len(certain), self._given)
        if len(certain) == len(text):
            self._keep(visible)
        elif len(self._window) > WINDOW:
            self._drop_front(text)
        return new

    def finish(self) -> str:
        """What was held back. Nothing may be pushed afterwards."""
        text = self._tokenizer.decode(self._window)[self._given :]
        self._window, self._given = [], 0
        return text

    def _keep(self, visible: Sequence[int]) -> None:
        """Keep the last tokens: a decoder may treat a first one differently (its space)."""
        self._window = list(visible[-WINDOW:])
        self._given = len(self._tokenizer.decode(self._window))

    def _drop_front(self, text: str) -> None:
        """Split a window that ends in bytes of no character, where the split changes nothing.

        The cut is a character's length from the end, so that its far side cannot change any more.
        """
        for cut in range(len(self._window) - LONGEST_CHARACTER, 0, -1):
            rest = self._tokenizer.decode(self._window[cut:])
            front = self._tokenizer.decode(self._window[:cut])
            if front + rest == text and len(front) <= self._given:
                self._window = self._window[cut:]
                self._given -= len(front)
                return
            if cut < len(self._window) - 2 * LONGEST_CHARACTER:
                return
