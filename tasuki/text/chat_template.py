"""Renders a conversation to the text a model was trained on, by the template in its directory.

The template is a program from someone else: it runs in jinja's sandbox and its output is bounded.
Knows nothing about tokens; never torch. Encode what comes out without adding special tokens again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tasuki.errors import InvalidRequestError, ModelError
from tasuki.model.fields import read_json

MAX_CHARACTERS = 4 << 20
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")

_FAILURES = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
    RecursionError, MemoryError,
)  # fmt: skip


class _Generation(Extension):
    """`{% generation %}` marks what a model learns to write; in a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - the base class has it so

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ModelError for a template that is no valid jinja."""
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template is not valid: {error}") from None
        except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
            raise ModelError(
                f"the chat template cannot be compiled: {type(error).__name__}: {error}"
            ) from None

    @classmethod
    def from_directory(cls, path: Path) -> ChatTemplate | None:
        """Read `chat_template.jinja`, or `chat_template` of `tokenizer_config.json`; else None."""
        file, own = path / "tokenizer_config.json", path / "chat_template.jinja"
        values = read_json(file) if file.is_file() else {}
        if own.is_file():
            try:
                source: Any = own.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ModelError(f"{own} cannot be read: {error}") from None
        else:
            source = _default(values.get("chat_template"))
        if source is None:
            return None
        if not isinstance(source, str):
            raise ModelError(f"{file} has a chat_template that is neither text nor a list of them")
        return cls(source, _special_tokens(values))

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as text. `messages` have `role` and `content`.

        Raises InvalidRequestError when the template refuses them or makes too much of them.
        """
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            ):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_CHARACTERS:
                    raise InvalidRequestError(
                        f"the chat template makes more than {MAX_CHARACTERS} characters of this "
                        "conversation; send a shorter one"
                    )
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the chat template refused the messages: {error}") from None
        except _FAILURES as error:
            raise InvalidRequestError(
                f"the chat template failed on the messages: {type(error).__name__}: {error}"
            ) from None
        return "".join(pieces)


def _default(templates: Any) -> Any:
    """Some directories have a list of named templates; the one named `default` is for chats."""
    if not isinstance(templates, list):
        return templates
    named = {t.get("name"): t.get("template") for t in templates if isinstance(t, dict)}
    return named.get("default")


def _special_tokens(values: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens, which are plain or wrapped in an object with their `content`."""
    found: dict[str, str] = {}
    for name in SPECIAL_TOKENS:
        token = values.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = time.strftime
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    # jinja's own filter escapes for HTML, which a model never saw.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
