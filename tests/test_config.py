from __future__ import annotations

from dataclasses import dataclass

import pytest

from tasuki.config import WorkerConfig, build, effective, parse_size, setting, to_args
from tasuki.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Example:
    port: int = setting(5, "A port.")
    ratio: float = setting(0.5, "A ratio.")
    shout: bool = setting(False, "A switch.")
    name: str | None = setting(None, "A name.")
    mode: str = setting("a", "A choice.", choices=("a", "b"))
    secret_token: str = setting("", "Never logged.")


def test_flags_go_over_environment_over_defaults() -> None:
    env = {"TASUKI_PORT": "7", "TASUKI_RATIO": "0.25", "TASUKI_SHOUT": "yes"}
    made = build(Example, {"port": "9", "ratio": None}, env)
    assert made == Example(port=9, ratio=0.25, shout=True)
    assert build(Example, {}, {}) == Example()


@pytest.mark.parametrize(
    ("given", "env", "words"),
    [
        ({"port": "x"}, {}, "--port is 'x'; expected a whole number"),
        ({}, {"TASUKI_PORT": "1.5"}, "TASUKI_PORT is '1.5'"),
        ({"ratio": "much"}, {}, "expected a number"),
        ({}, {"TASUKI_SHOUT": "perhaps"}, "expected true or false"),
        ({"mode": "c"}, {}, "expected one of a, b"),
    ],
)
def test_what_cannot_be_used_is_named(
    given: dict[str, str], env: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        build(Example, given, env)


def test_a_config_survives_the_way_to_a_child() -> None:
    from argparse import ArgumentParser

    from tasuki.config import add_flags

    config = Example(port=9, shout=True, name="n m", ratio=1e-3)
    parser = ArgumentParser()
    add_flags(parser, Example)
    assert build(Example, vars(parser.parse_args(to_args(config))), {}) == config


def test_secrets_are_left_out_of_what_is_shown() -> None:
    assert "secret_token" not in effective(Example(secret_token="s"))
    assert effective(Example())["port"] == "5"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", 10**400),
        ("link_timeout", float("inf")),
        ("threads", 0),
        ("port", 70000),
        ("kv_blocks", -1),
        ("link_timeout", float("nan")),
    ],
)
def test_a_worker_setting_out_of_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        build(WorkerConfig, {name: value}, {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", 0), ("4096", 4096), ("512MiB", 512 << 20), ("1.5 GiB", 3 << 29), ("2gb", 2 * 10**9)],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size("--x", text) == expected


@pytest.mark.parametrize(
    "text", ["lots", "-1MiB", "5 parsecs", "MiB", "1e9", "0x10", "9" * 500 + "GiB"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--x is"):
        parse_size("--x", text)


def test_a_wrong_size_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory is 'lots'"):
        WorkerConfig(kv_cache_memory="lots")


def test_blocks_and_memory_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        WorkerConfig(kv_blocks=5, kv_cache_memory="1GiB")
