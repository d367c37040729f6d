"""The tokenizer on a byte vocabulary: ids are bytes, special tokens are whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tasuki.convert.byte_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE
from tasuki.errors import InvalidRequestError, ModelError
from tasuki.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(tiny_directory)


def test_bytes(tokenizer: Tokenizer) -> None:
    text = "naïve 🙂 \x00\t\n 12"
    assert tokenizer.encode(text, add_special_tokens=False) == list(text.encode())
    assert tokenizer.encode("a") == [BOS_ID, 97]
    assert tokenizer.encode("", add_special_tokens=False) == []
    assert tokenizer.vocab_size == VOCAB_SIZE


def test_special_tokens_are_found_in_text_and_left_out_of_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|eos|>b", add_special_tokens=False)
    assert ids == [97, EOS_ID, 98]
    assert tokenizer.decode(ids) == "ab"
    assert EOS_ID in tokenizer.special_ids


def test_every_text_comes_back(tokenizer: Tokenizer) -> None:
    @given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<")))
    def comes_back(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == text

    comes_back()


def test_invalid_bytes_are_replaced(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([0xFF, 97, 0xE2, 0x82]) == "\ufffda\ufffd"


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_text_that_is_no_unicode_is_refused(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        tokenizer.encode(text)


def test_truncation_and_padding_of_the_file_are_not_applied(
    tiny_directory: Path, tmp_path: Path
) -> None:
    inner = tokenizers.Tokenizer.from_file(str(tiny_directory / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=8)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert len(tokenizer.encode("abcdefghij")) == 11
    assert len(tokenizer.encode("a")) == 2


UNKNOWN_SPECIAL = {
    "type": "TemplateProcessing", "pair": [], "special_tokens": {},
    "single": [{"SpecialToken": {"id": "none", "type_id": 0}}],
}  # fmt: skip
WORDS = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}


def changed(directory: Path, target: Path, **parts: Any) -> Path:
    values = json.loads((directory / "tokenizer.json").read_text()) | parts
    (target / "tokenizer.json").write_text(json.dumps(values))
    return target


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    for content in (b"", b"{}", b"[1]", b"null", b'{"a":' * 100_000, b"{\xff"):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(ModelError, match="no valid tokenizer"):
            Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"post_processor": UNKNOWN_SPECIAL},
    ],
    ids=["on reading", "on any text"],
)
def test_a_file_that_makes_the_library_panic_is_named(
    tiny_directory: Path, tmp_path: Path, parts: dict[str, Any]
) -> None:
    """A panic is no Exception, and would end whatever thread it is in."""
    with pytest.raises(ModelError, match="no valid tokenizer"):
        Tokenizer.from_directory(changed(tiny_directory, tmp_path, **parts))


def test_text_outside_a_vocabulary_is_the_requests_fault(
    tiny_directory: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "model": WORDS,
        "pre_tokenizer": None,
        "post_processor": None,
        "added_tokens": [],
    }
    tokenizer = Tokenizer.from_directory(changed(tiny_directory, tmp_path, **settings))
    assert tokenizer.encode("a") == [0]
    with pytest.raises(InvalidRequestError, match="cannot encode the text"):
        tokenizer.encode("b")
