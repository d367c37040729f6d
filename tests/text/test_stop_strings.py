"""Stop strings against a naive reading of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasuki.text.stop_strings import StopStrings

texts = st.text("ab\N{PILE OF POO}", max_size=40)  # few letters: many overlaps
stops = st.lists(st.text("ab\N{PILE OF POO}", min_size=1, max_size=6), max_size=5)
pieces = st.lists(texts.map(lambda text: text[:7]), max_size=12)


def naive(text: str, strings: list[str], unarmed: int, include: bool) -> tuple[str, str | None]:
    """What of `text` may be seen, and the stop that ended it; none ends in the first characters."""
    for end in range(unarmed + 1, len(text) + 1):
        found = [string for string in strings if text[:end].endswith(string)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@settings(max_examples=500, deadline=None)
@given(pieces, stops, st.integers(0, 12), st.booleans())
def test_as_read_at_once(parts: list[str], strings: list[str], unarmed: int, include: bool) -> None:
    reader = StopStrings(strings, include=include)
    out = "".join(reader.push(part, armed=n >= unarmed) for n, part in enumerate(parts))
    out += reader.finish()
    before = len("".join(parts[:unarmed]))
    wanted = naive("".join(parts), strings, before, include)
    assert (out, reader.matched) == wanted


@settings(max_examples=300, deadline=None)
@given(pieces, stops)
def test_exactly_what_may_begin_a_stop_is_held_back(parts: list[str], strings: list[str]) -> None:
    reader, text, out = StopStrings(strings), "", ""
    for part in parts:
        text += part
        out += reader.push(part)
        if reader.matched is not None:
            break
        beginnings = {string[:n] for string in strings for n in range(1, len(string))}
        held = max((len(b) for b in beginnings if text.endswith(b)), default=0)
        assert out == text[: len(text) - held]


def test_nothing_comes_after_a_match() -> None:
    reader = StopStrings(["stop"])
    assert reader.push("go st") == "go "
    assert reader.push("op and on") == ""
    assert reader.matched == "stop"
    assert reader.push("more") == ""
    assert reader.finish() == ""


def test_the_string_that_ends_first_wins_and_then_the_longest() -> None:
    reader = StopStrings(["abcd", "bc", "c", "xbc"])
    assert reader.push("_abcd") == "_a"
    assert reader.matched == "bc"
    reader = StopStrings(["c", "xbc", "bc"])
    assert reader.push("_xbc") == "_"
    assert reader.matched == "xbc"


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_a_long_near_miss_costs_linear_time(size: int) -> None:
    """Counted in steps of the automaton: at most two a character, whatever the strings."""

    class Counting(StopStrings):
        steps = 0

        def _step(self, state: int, character: str) -> int:
            self.steps += 1
            while state and character not in self._next[state]:
                state = self._shorter[state]
                self.steps += 1
            return self._next[state].get(character, 0)

    strings = ["a" * n + "b" for n in range(241, 257)]
    reader, text = Counting(strings), "a" * 100_000
    reader.steps = 0
    out = "".join(reader.push(text[at : at + size]) for at in range(0, len(text), size))
    assert reader.steps <= 2 * len(text)
    assert out + reader.finish() == text
