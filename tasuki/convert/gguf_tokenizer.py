"""The byte-level BPE tokenizer of a GGUF file as a tokenizers object.

The file holds tokens and merges, but only *names* its pre-tokenizer: how text is cut before merging
is known here, for the names that are known exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split

from tasuki.convert.gguf_model import GgufModel
from tasuki.errors import ModelError

CONTROL = 3  # token type of special tokens


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
    "llama-bpe": lambda: _split(r"\p{N}{1,3}"),
}


def read_tokenizer(model: GgufModel) -> tokenizers.Tokenizer:
    """Raises ModelError for a kind of tokenizer that is not known exactly."""
    kind, name = model.value("tokenizer.ggml.model"), model.maybe("tokenizer.ggml.pre") or "default"
    if kind != "gpt2" or name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{model.path} has a tokenizer {str(kind)[:60]} with pre-tokenizer {str(name)[:60]}; "
            f"expected gpt2 with one of {', '.join(PRE_TOKENIZERS)}: use the model's Hugging Face "
            "directory instead"
        )
    tokens: list[str] = model.value("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in model.value("tokenizer.ggml.merges")]
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=name == "llama-bpe")
    )
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    types = model.value("tokenizer.ggml.token_type")
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(text, normalized=False, special=True) for text in special]
    )
    if model.maybe("tokenizer.ggml.add_bos_token"):
        bos = int(model.value("tokenizer.ggml.bos_token_id"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer
