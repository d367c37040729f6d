"""Chat templates: found, rendered as transformers does, sandboxed, bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasuki.convert.byte_tokenizer import CHAT_TEMPLATE
from tasuki.errors import InvalidRequestError, ModelError
from tasuki.text.chat_template import MAX_CHARACTERS, ChatTemplate
from tasuki.text.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "hi"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "<b>'é'</b> 🙂"},
    {"role": "assistant", "content": ""},
]
TRICKY = """
{%- for message in messages %}
    {% if message.role == 'system' %}
        {%- continue %}
    {% endif %}
{{ loop.index }} {{ message | tojson }} {{ {'a': 1} | tojson(indent=2) }}
{% endfor %}
{% if add_generation_prompt %}{{ bos_token }}{{ missing }}>{% endif %}
"""


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"})


def test_tiny(tiny_directory: Path) -> None:
    found = ChatTemplate.from_directory(tiny_directory)
    assert found is not None
    text = found.render(HELLO)
    assert text == "<|bos|><|turn|>user\nhi<|end|>\n<|turn|>assistant\n"
    assert found.render(HELLO, add_generation_prompt=False) == text.removesuffix(
        "<|turn|>assistant\n"
    )
    ids = Tokenizer.from_directory(tiny_directory).encode(text, add_special_tokens=False)
    assert ids.count(256) == 1


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, TRICKY])
@pytest.mark.parametrize("messages", [HELLO, TALK])
def test_equals_transformers(tiny_directory: Path, source: str, messages: list[Any]) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tiny_directory)
    found = ChatTemplate(source, {"bos_token": "<|bos|>", "eos_token": "<|eos|>"})
    for prompt in (True, False):
        expected = theirs.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=prompt
        )
        assert found.render(messages, prompt) == expected


@pytest.mark.parametrize(
    ("config", "own", "expected"),
    [
        (None, None, None),
        ({"chat_template": "A"}, None, "A"),
        ({"chat_template": "A"}, "B", "B"),
        (None, "B{{ bos_token }}", "B"),
        ({"chat_template": [{"name": "tools", "template": "T"}]}, None, None),
        ({"chat_template": [{"name": "default", "template": "D"}]}, None, "D"),
        ({"chat_template": "{{ bos_token }}", "bos_token": {"content": "<s>"}}, None, "<s>"),
    ],
)
def test_where_it_is_found(
    tmp_path: Path, config: object, own: str | None, expected: str | None
) -> None:
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if own is not None:
        (tmp_path / "chat_template.jinja").write_text(own)
    found = ChatTemplate.from_directory(tmp_path)
    assert (found.render(HELLO) if found else None) == expected


def test_a_damaged_template_is_the_models_fault(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not valid"):
        template("{% if %}")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 5}')
    with pytest.raises(ModelError, match="chat_template"):
        ChatTemplate.from_directory(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
        ChatTemplate.from_directory(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
        "{% if 1 %}" * 3000 + "x" + "{% endif %}" * 3000,
        "{% for i in [1] %}" * 30 + "x" + "{% endfor %}" * 30,
        "{{ 10 ** 5000 }}",
    ],
    ids=["brackets", "ifs", "loops", "number"],
)
def test_a_template_that_cannot_be_compiled_is_the_models_fault(source: str) -> None:
    with pytest.raises(ModelError, match="cannot be compiled"):
        template(source)


def test_what_a_model_is_trained_to_write_may_be_marked() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert template(source).render(HELLO) == HELLO[0]["content"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[7]['role'] }}", "refused"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{% for i in range(10**9) %}x{% endfor %}", "failed|refused"),
        ("{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}", str(MAX_CHARACTERS)),
        ("{{ 1 / 0 }}", "ZeroDivision"),
    ],
)
def test_what_goes_wrong_while_rendering_is_the_requests_fault(source: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        template(source).render(HELLO)


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequestError):
        template("{% set x = messages[0].update({'role': 'system'}) %}").render(messages)
    assert messages == [{"role": "user", "content": "hi"}]


def test_the_date() -> None:
    assert len(template("{{ strftime_now('%Y') }}").render(HELLO)) == 4
