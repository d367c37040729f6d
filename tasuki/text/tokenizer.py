"""Text to token ids and back, by the `tokenizer.json` of a model directory. Never torch.

Knows nothing about chat templates or requests. Sentencepiece files (`tokenizer.model`) are not
read.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers

from tasuki.errors import InvalidRequestError, ModelError

TRIAL = "a word, é\n12"  # a file may be readable, and make the library panic on any text


class Tokenizer:
    """Immutable, and safe to use from several threads."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        # Some files carry the settings of a training run; a prompt is never cut or filled up.
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.special_ids = frozenset(
            id_ for id_, token in inner.get_added_tokens_decoder().items() if token.special
        )
        self.byte_ids = _fallback_bytes(inner)

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Read `tokenizer.json`. Raises ModelError when it is missing or damaged."""
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"{path} has no tokenizer.json; convert the tokenizer to that form")
        try:
            with _failures_as_value_errors():
                inner = tokenizers.Tokenizer.from_file(str(file))
                with contextlib.suppress(Exception):  # no vocabulary has to have every word
                    inner.encode(TRIAL)
                return cls(inner)
        except ValueError as error:
            raise ModelError(f"{file} is no valid tokenizer: {error}") from None

    @property
    def vocab_size(self) -> int:
        """Number of token ids with a text, added tokens included."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. A rendered chat carries its special tokens: do not add them again.

        Raises InvalidRequestError for text that is no valid Unicode, or has no tokens.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text is not valid Unicode: {error.reason} at character {error.start}"
            ) from None
        try:
            with _failures_as_value_errors():
                return self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        except ValueError as error:
            raise InvalidRequestError(
                f"the model's tokenizer cannot encode the text: {error}"
            ) from None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids without special tokens; bytes that are no valid UTF-8 become U+FFFD."""
        return self._inner.decode(list(token_ids), skip_special_tokens=True)


@contextlib.contextmanager
def _failures_as_value_errors() -> Iterator[None]:
    """The library raises a bare Exception, or where it panics something that is none at all."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ValueError(str(error)) from None


def _fallback_bytes(inner: tokenizers.Tokenizer) -> frozenset[int]:
    """Ids of the tokens <0x00> .. <0xFF>, if the decoder puts runs of them together as bytes."""
    decoder = json.loads(inner.to_str()).get("decoder") or {}
    kinds = {part.get("type") for part in [decoder, *decoder.get("decoders", [])]}
    if "ByteFallback" not in kinds:
        return frozenset()
    ids = (inner.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(id_ for id_ in ids if id_ is not None)
