"""Incremental text: the pieces add up, nothing is taken back, and the work is linear."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from tasuki.convert.byte_tokenizer import EOS_ID, VOCAB_SIZE
from tasuki.text.detokenizer import IncrementalDetokenizer
from tasuki.text.tokenizer import Tokenizer


class CountingTokenizer(Tokenizer):
    """Counts the tokens it decodes."""

    decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.decoded += len(token_ids)
        return super().decode(token_ids)


@pytest.fixture(scope="module")
def byte_level(tiny_directory: Path) -> Tokenizer:
    return CountingTokenizer.from_directory(tiny_directory)


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """As Llama 2's: words with a leading mark, and single bytes for what has no word."""
    words = ["<unk>", "▁a", "b", "▁", "▁long", "é"]
    vocab = {word: i for i, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip
    return Tokenizer(inner)


def stream(tokenizer: Tokenizer, ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """The pieces for ids that arrive in groups of these sizes, over and over."""
    detokenizer, pieces, at, turn = IncrementalDetokenizer(tokenizer), [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(detokenizer.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*pieces, detokenizer.finish()]


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=5)
UTF8 = st.text(max_size=60).filter(str.isprintable).map(lambda text: list(text.encode()))


def test_pieces_add_up(byte_level: Tokenizer) -> None:
    @given(st.lists(st.one_of(st.integers(0, VOCAB_SIZE - 1), UTF8), max_size=80), SIZES)
    def add_up(parts: list[int | list[int]], sizes: list[int]) -> None:
        ids = [id_ for part in parts for id_ in (part if isinstance(part, list) else [part])]
        assert "".join(stream(byte_level, ids, sizes)) == byte_level.decode(ids)

    add_up()


def test_pieces_add_up_with_byte_fallback(byte_fallback: Tokenizer) -> None:
    @given(st.lists(st.one_of(st.integers(0, 5), st.integers(6, 261)), max_size=60), SIZES)
    def add_up(ids: list[int], sizes: list[int]) -> None:
        assert "".join(stream(byte_fallback, ids, sizes)) == byte_fallback.decode(ids)

    add_up()


def test_a_character_is_never_cut(byte_level: Tokenizer) -> None:
    text = "a🙂é€"
    pieces = stream(byte_level, list(text.encode()), [1])
    assert [piece for piece in pieces if piece] == list(text)


def test_text_comes_as_early_as_it_can(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level)
    assert detokenizer.push([0xF0, 0x9F]) == ""
    assert detokenizer.push([EOS_ID]) == ""
    assert detokenizer.push([0x99, 0x82, 97]) == "🙂a"
    assert detokenizer.push([0xE2]) == ""
    assert detokenizer.push([98]) == "\ufffdb"  # the character never came
    assert detokenizer.push([0xE2, 0x82]) == ""
    assert detokenizer.finish() == "\ufffd"


@pytest.mark.parametrize("pattern", [b"\xff", b"\xe2\x82", b"\xf0\x9f\x99", b"a", "€🙂".encode()])
def test_work_is_linear(byte_level: Tokenizer, pattern: bytes) -> None:
    """Also for bytes that never make a character."""
    assert isinstance(byte_level, CountingTokenizer)
    ids = list(pattern * 2000)[:2000]
    before = byte_level.decoded
    stream(byte_level, ids, [1])
    assert byte_level.decoded - before < 60 * len(ids)


def test_leading_space_of_a_later_word_stays(byte_fallback: Tokenizer) -> None:
    assert stream(byte_fallback, [1, 4, 2, 4], [1]) == ["a", " long", "b", " long", ""]
