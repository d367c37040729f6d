"""Which flags of `tasuki generate` make sense."""

from __future__ import annotations

import pytest

from cli.generate import GenerateConfig
from cli.sampling_flags import parse_logit_bias, parse_stop, parse_token_ids
from tasuki.config import build
from tasuki.errors import ConfigError


def test_token_ids() -> None:
    assert parse_token_ids("--token-ids", "") == ()
    assert parse_token_ids("--token-ids", "1, 2,3") == (1, 2, 3)


@pytest.mark.parametrize("text", ["1,,2", "a", "-1", "1.5", "99999999999", "1;2"])
def test_token_ids_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--token-ids holds"):
        parse_token_ids("--token-ids", text)


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
        ({"prompt": "a", "top_p": "most"}, "--top-p is 'most'; expected a number"),
        ({"prompt": "a", "logit_bias": "5=1"}, "--logit-bias holds '5=1'; expected pairs"),
        ({"prompt": "a", "logit_bias": "5:1,,6:2"}, "--logit-bias holds ''"),
        ({"prompt": "a", "stop_token_ids": "5,x"}, "--stop-token-ids holds 'x'"),
        ({"prompt": "a", "stop": "[1]"}, "--stop is '.1.'; expected one text, or a list"),
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
    given = {name: value for name, value in question.sampling.items() if value}
    assert (config.target, question.token_ids) == ("127.0.0.1:4000", (7, 8))
    assert given == {"seed": 9, "ignore_eos": True, "temperature": 0.5}


def test_several_values_in_one_text() -> None:
    assert parse_logit_bias("") == {}
    assert parse_logit_bias("5:1.5, 7:-100") == {5: 1.5, 7: -100.0}
    assert parse_stop("") == []
    assert parse_stop("\n\n") == ["\n\n"]
    assert parse_stop("[not a list") == ["[not a list"]
    assert parse_stop('["a", "b c"]') == ["a", "b c"]
