"""Finds the first of several stop strings in a stream of text, and lets no part of one out early.

Knows nothing about tokens. An automaton reads every character once, whatever the pieces it comes in
and however the strings overlap (Aho and Corasick, "Efficient string matching: an aid to
bibliographic search", 1975).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """One request's stops; `matched` is the one that ended its text, once one has.

    The string that is complete first wins; of several that end together, the longest. With
    `include` the text goes up to the end of that string, else to its beginning.
    """

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        self.matched: str | None = None
        self._include = include
        # A state is the longest end of the text that begins some string; 0 is the empty one.
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]  # characters of a state
        self._shorter = [0]  # the longest state that is a proper end of this one
        self._found: list[str | None] = [None]  # the longest string that ends here
        for string in strings:
            self._add(string)
        self._connect()
        self._state = 0
        self._held = ""  # the text of the state: perhaps the beginning of a stop

    def push(self, text: str, *, armed: bool = True) -> str:
        """The text that became certain with `text`; empty once a stop has matched.

        A string that ends in text which is not `armed` does not count; it may begin there.
        """
        if self.matched is not None:
            return ""
        state = self._state
        for index, character in enumerate(text):
            state = self._step(state, character)
            found = self._found[state]
            if armed and found is not None:
                self.matched = found
                whole = self._held + text[: index + 1]
                self._held = ""
                return whole if self._include else whole[: len(whole) - len(found)]
        self._state = state
        whole = self._held + text
        certain = len(whole) - self._depth[state]
        self._held = whole[certain:]
        return whole[:certain]

    def finish(self) -> str:
        """What was held back: the text ends, and it was no stop."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _add(self, string: str) -> None:
        assert string, "an empty stop would match at once"
        state = 0
        for character in string:
            following = self._next[state].setdefault(character, len(self._next))
            if following == len(self._next):
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._shorter.append(0)
                self._found.append(None)
            state = following
        self._found[state] = string

    def _connect(self) -> None:
        """Find each state's shorter one: breadth first, as those must be known before it."""
        states = deque(self._next[0].values())
        while states:
            state = states.popleft()
            for character, following in self._next[state].items():
                self._shorter[following] = self._step(self._shorter[state], character)
                states.append(following)
            if self._found[state] is None:
                self._found[state] = self._found[self._shorter[state]]

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)
