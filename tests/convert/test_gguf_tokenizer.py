"""Tokenizers out of GGUF files give the ids that transformers gives."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Tokenizer, Qwen2Tokenizer

from tasuki.convert.gguf_directory import ensure_gguf
from tasuki.errors import ModelError
from tasuki.model.config import ModelConfig
from tasuki.text.tokenizer import Tokenizer
from tests.convert.gguf_files import BYTES, MERGES, SPECIAL, original, write_gguf

TOKENS = [*BYTES, *SPECIAL, *(merge.replace(" ", "") for merge in MERGES)]
PIECES = [
    "he", "ab", " a", "12", "1212", "  ", "\n", "\r\n\n", "\t", "'s", "'RE", "é", "e\u0301", "漢字",
    "½", "٣", "...", " !", "_x", "😀", "\u00a0", "Ab", "\u2028",
]  # fmt: skip


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return original(tmp_path_factory.mktemp("original"))


def convert(folder: Path, tensors: Any, **settings: Any) -> Path:
    return ensure_gguf(write_gguf(folder / "small.gguf", tensors, **settings), folder / "cache")


@pytest.mark.parametrize(("pre", "kind"), [("qwen2", Qwen2Tokenizer), ("gpt-2", GPT2Tokenizer)])
def test_equal_to_transformers(tmp_path: Path, tensors: Any, pre: str, kind: type[Any]) -> None:
    mine = Tokenizer.from_directory(convert(tmp_path, tensors, pre=pre))
    vocab = {token: id_ for id_, token in enumerate(TOKENS)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n")
    theirs = kind.from_pretrained(tmp_path, unk_token="<x>", eos_token="</s>", pad_token="<y>")
    draw = random.Random(7)
    for _ in range(500):
        text = "".join(draw.choices(PIECES, k=12))
        assert mine.encode(text, False) == theirs(text, add_special_tokens=False).input_ids, text


def test_a_token_that_is_never_cut_is_one_id_and_stays_in_the_text(
    tmp_path: Path, tensors: Any
) -> None:
    tokenizer = Tokenizer.from_directory(convert(tmp_path, tensors, never_cut=["<think>"]))
    assert tokenizer.encode("ab<think>ab", False) == [260, len(TOKENS), 260]
    assert tokenizer.decode([260, len(TOKENS), 256, 260]) == "ab<think>ab"


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({"pre": "llama-bpe"}, 256),  # whose other readers put one there
        ({"pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, 260),
        ({"pre": "qwen2"}, 260),
        ({"pre": "qwen2", "tokenizer.ggml.add_bos_token": True}, 256),
    ],
)
def test_whether_a_bos_comes_first(
    tmp_path: Path, tensors: Any, settings: dict[str, Any], first: int
) -> None:
    assert Tokenizer.from_directory(convert(tmp_path, tensors, **settings)).encode("ab")[0] == first


@pytest.mark.parametrize(("said", "around"), [("eos", (0, 1)), ("both", (1, 1)), ("bos", (1, 0))])
def test_what_a_text_is_put_between(
    tmp_path: Path, tensors: Any, said: str, around: tuple[int, int]
) -> None:
    names = ("bos", "eos") if said == "both" else (said,)
    more: dict[str, Any] = {f"tokenizer.ggml.add_{name}_token": True for name in names}
    tokenizer = Tokenizer.from_directory(convert(tmp_path, tensors, **more))
    bare = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.encode("a") == [256] * around[0] + bare + [257] * around[1]


def test_the_end_of_a_turn_ends_an_answer_too(tmp_path: Path, tensors: Any) -> None:
    more: dict[str, Any] = {"tokenizer.ggml.eot_token_id": 258, "tokenizer.ggml.eom_token_id": 259}
    config = ModelConfig.from_directory(convert(tmp_path, tensors, **more))
    assert config.bos_token_id == 256
    assert config.eos_token_ids == {257, 258, 259}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tokenizer.ggml.eot_token_id": 264}, "eot_token_id = 264; expected an id from 0 to 263"),
        ({"tokenizer.ggml.eot_token_id": "end"}, "eot_token_id = end; expected an id"),
        ({"tokenizer": "llama"}, "tokenizer llama"),
        ({"pre": "tekken"}, "pre-tokenizer tekken"),
    ],
)
def test_nonsense_is_named(
    tmp_path: Path, tensors: Any, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        convert(tmp_path, tensors, **settings)


def test_merges_of_unknown_tokens_are_named(tmp_path: Path, tensors: Any) -> None:
    file = write_gguf(tmp_path / "small.gguf", tensors)
    file.write_bytes(file.read_bytes().replace(b"h e", b"h\0e"))
    with pytest.raises(ModelError, match="merges"):
        ensure_gguf(file, tmp_path / "cache")
