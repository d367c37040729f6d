"""Which flags of `tasuki generate` make sense."""

from __future__ import annotations

import pytest

from cli.generate import GenerateConfig, parse_token_ids
from tasuki.config import build
from tasuki.errors import ConfigError


def test_token_ids() -> None:
    assert parse_token_ids("") == ()
    assert parse_token_ids("1, 2,3") == (1, 2, 3)


@pytest.mark.parametrize("text", ["1,,2", "a", "-1", "1.5", "99999999999", "1;2"])
def test_token_ids_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--token-ids holds"):
        parse_token_ids(text)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "neither is given"),
        ({"prompt": "a", "token_ids": "1"}, "both are given"),
        ({"prompt": "a", "target": "nowhere"}, "--target is 'nowhere'"),
        ({"prompt": "a", "target": "host:0"}, "--target is 'host:0'"),
        ({"prompt": "a", "seed": "-1"}, "--seed is -1"),
        ({"prompt": "a", "seed": str(1 << 64)}, "--seed is"),
        ({"prompt": "a", "max_tokens": "-4"}, "--max-tokens is -4"),
        ({"prompt": "a", "timeout": "nan"}, "--timeout is nan"),
        ({"prompt": "a", "temperature": "warm"}, "--temperature is 'warm'; expected a number"),
    ],
)
def test_refuses_in_words(given: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build(GenerateConfig, given, {})


def test_the_question_carries_what_was_given() -> None:
    env = {"TASUKI_TARGET": "127.0.0.1:4000", "TASUKI_TEMPERATURE": "0.5"}
    config = build(GenerateConfig, {"token_ids": "7,8", "seed": "9", "ignore_eos": True}, env)
    question = config.question()
    assert (config.target, question.token_ids, question.seed) == ("127.0.0.1:4000", (7, 8), 9)
    assert (question.temperature, question.ignore_eos, question.max_tokens) == (0.5, True, None)
