"""The text of an answer does not depend on how its tokens were grouped, and ends where it must."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from router.answer_text import AnswerText
from router.generation import Generation
from router.served_model import ServedModel
from tasuki.messages import SamplingParams
from tasuki.slo import Slo
from tasuki.text.tokenizer import Tokenizer

LETTERS = "ab é😀"


def byte_fallback() -> Tokenizer:
    """A run of single bytes is text, or not, only as a whole: it becomes certain late."""
    vocab = {"<unk>": 0, "a": 1, "b": 2, "ab": 3, " ": 4}
    vocab |= {f"<0x{byte:02X}>": 5 + byte for byte in range(256)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(inner)


def generation(stop: Sequence[str], include: bool = False, **sampling: object) -> Generation:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]  # a test's own
    return Generation("r", [1], params, Slo(1.0, 1.0), tuple(stop), include)


def read(
    tokenizer: Tokenizer, asked: Generation, ids: Sequence[int], sizes: Sequence[int]
) -> tuple[str, int, str | None]:
    """Text, number of tokens and the stop, for ids in groups of these sizes, over and over."""
    answer, text, at, turn = AnswerText(tokenizer, asked), "", 0, 0
    while at < len(ids) and answer.stop is None:
        size = sizes[turn % len(sizes)]
        text += answer.push(ids[at : at + size])
        at, turn = at + size, turn + 1
    return text + answer.finish(), answer.num_tokens, answer.stop


@pytest.fixture(scope="module", params=["byte level", "byte fallback"])
def tokenizer(request: pytest.FixtureRequest, model: ServedModel) -> Tokenizer:
    return model.tokenizer if request.param == "byte level" else byte_fallback()


texts = st.text(LETTERS, max_size=12)
stops = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3)


@settings(deadline=None)
@given(data=st.data())
def test_any_grouping_gives_what_the_whole_text_says(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    text, strings = data.draw(texts), data.draw(stops)
    asked = generation(strings, include := data.draw(st.booleans()), min_tokens=0)
    ids = ids_of(tokenizer, text)
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    got, count, stop = read(tokenizer, asked, ids, sizes)
    assert (got, stop) == cut(text, strings, include)
    assert (got, count, stop) == read(tokenizer, asked, ids, [1])
    assert count == len(ids) or stop is not None


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Bytes as single tokens in either vocabulary, letters as themselves."""
    if not tokenizer.byte_ids:
        return list(text.encode())
    words = {"a": 1, "b": 2, " ": 4}
    return [
        id_
        for letter in text
        for id_ in ([words[letter]] if letter in words else [5 + byte for byte in letter.encode()])
    ]


def cut(text: str, strings: Sequence[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = max((s for s in strings if text[:end].endswith(s)), key=len, default=None)
        if found is not None:
            return text[: end if include else end - len(found)], found
    return text, None


def test_min_tokens_and_hidden_tokens_count_tokens_not_messages(model: ServedModel) -> None:
    for sizes in ([1], [2], [9]):
        asked = generation([], stop_token_ids=[97], min_tokens=1)
        assert read(model.tokenizer, asked, list(b"aba"), sizes) == ("ab", 3, None)
        asked = generation(["a"], min_tokens=1)
        assert read(model.tokenizer, asked, list(b"abab"), sizes) == ("ab", 3, "a")
