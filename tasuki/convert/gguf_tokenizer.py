"""The byte-level BPE tokenizer of a GGUF file as a tokenizers object.

The file holds tokens and merges, but only *names* its pre-tokenizer: how text is cut before merging
is known here, for the names that are known exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split

from tasuki.convert.gguf_model import GgufModel
from tasuki.errors import ModelError

CONTROL, USER_DEFINED = 3, 4  # token types: special ones, and plain text that is never cut
ENDS = ("eos", "eot", "eom")  # the end of a text, of a turn in a chat, of a message in a turn
LLAMA3 = "llama-bpe"


def _split(digits: str) -> PreTokenizer:
    """Words with the sign before them, digits in groups, other signs, line ends, spaces."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence(
        [
            Split(Regex(pattern), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _bytes() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False)


PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "smollm": lambda: pre_tokenizers.Sequence([Digits(individual_digits=True), _bytes()]),
    "gpt-2": _bytes,
    "default": _bytes,
    "qwen2": lambda: _split(r"\p{N}"),
    LLAMA3: lambda: _split(r"\p{N}{1,3}"),
}


class GgufTokenizer:
    """The tokenizer's part of one file. Raises ModelError for what is not known exactly."""

    def __init__(self, model: GgufModel) -> None:
        self._model = model
        kind, name = model.value("tokenizer.ggml.model"), model.maybe("tokenizer.ggml.pre")
        self._pre = name or "default"
        if kind != "gpt2" or self._pre not in PRE_TOKENIZERS:
            raise ModelError(
                f"{model.path} has a tokenizer {str(kind)[:60]} with pre-tokenizer "
                f"{str(self._pre)[:60]}; expected gpt2 with one of {', '.join(PRE_TOKENIZERS)}: "
                "use the model's Hugging Face directory instead"
            )
        self.tokens = self._list("tokens", str)
        self._types = self._list("token_type", int)
        self._merges = self._list("merges", str)
        if len(self._types) != len(self.tokens):
            raise ModelError(
                f"{model.path} has {len(self.tokens)} tokens and {len(self._types)} token types; "
                "expected one type for each token"
            )

    def ids(self) -> dict[str, Any]:
        """`bos_token_id` and `eos_token_id` as config.json has them; without those not named."""
        ends = sorted({id_ for name in ENDS if (id_ := self._id(name)) is not None})
        eos = ends[0] if len(ends) == 1 else ends or None
        found = {"bos_token_id": self._id("bos"), "eos_token_id": eos}
        return {name: value for name, value in found.items() if value is not None}

    def special_tokens(self) -> dict[str, str]:
        """Texts of `bos_token` and `eos_token`, by which chat templates call them."""
        found = {f"{name}_token": self._id(name) for name in ("bos", "eos")}
        return {name: self.tokens[id_] for name, id_ in found.items() if id_ is not None}

    def build(self) -> tokenizers.Tokenizer:
        vocab = {token: id_ for id_, token in enumerate(self.tokens)}
        merges = [tuple(merge.split(" ")) for merge in self._merges]
        try:
            tokenizer = tokenizers.Tokenizer(
                models.BPE(vocab=vocab, merges=merges, ignore_merges=self._pre == LLAMA3)
            )
        except Exception as error:  # the library raises a bare Exception
            raise ModelError(f"{self._model.path} has merges that do not fit: {error}") from None
        if self._pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = PRE_TOKENIZERS[self._pre]()
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_tokens(
            [
                tokenizers.AddedToken(text, normalized=False, special=kind == CONTROL)
                for text, kind in zip(self.tokens, self._types, strict=True)
                if kind in (CONTROL, USER_DEFINED)
            ]
        )
        # Where the file is silent, its pre-tokenizer's name decides, as for its other readers.
        before = self._added("bos", unless_said=self._pre == LLAMA3)
        after = self._added("eos", unless_said=False)
        if before or after:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[*before, "$A", *after], special_tokens=[*(before | after).items()]
            )
        return tokenizer

    def _added(self, name: str, *, unless_said: bool) -> dict[str, int]:
        """The token that every text gets before or after it, with its id; empty: none."""
        said, id_ = self._model.maybe(f"tokenizer.ggml.add_{name}_token"), self._id(name)
        adds = unless_said if said is None else bool(said)
        return {self.tokens[id_]: id_} if adds and id_ is not None else {}

    def _id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        id_ = self._model.maybe(key)
        if id_ is None:
            return None
        if type(id_) is not int or not 0 <= id_ < len(self.tokens):
            raise ModelError(
                f"{self._model.path} has {key} = {str(id_)[:60]}; "
                f"expected an id from 0 to {len(self.tokens) - 1}"
            )
        return id_

    def _list(self, name: str, kind: type[Any]) -> list[Any]:
        key = f"tokenizer.ggml.{name}"
        found = self._model.value(key)
        if not isinstance(found, list) or not all(type(value) is kind for value in found):
            raise ModelError(f"{self._model.path} has a {key} that is no list of {kind.__name__}")
        return found
