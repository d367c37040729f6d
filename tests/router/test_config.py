"""Router settings: addresses, limits, and words for what cannot be used."""

from __future__ import annotations

import pytest

from router.config import RouterConfig
from tasuki.config import build, to_args
from tasuki.errors import ConfigError


def test_addresses_and_setup() -> None:
    config = RouterConfig(decode_workers="a:1, b:2,", prefill_workers="c:3")
    assert config.decode_addresses == ("a:1", "b:2")
    assert config.prefill_addresses == ("c:3",)
    assert config.setup == "split"
    assert RouterConfig(decode_workers="a:1").setup == "colocated"
    assert config.slo.ttft == pytest.approx(config.slo_ttft_ms / 1000)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"decode_workers": ""}, "--decode-workers is empty"),
        ({"decode_workers": "nonsense"}, "'nonsense'; expected host:port"),
        ({"decode_workers": "a:0"}, "expected host:port"),
        ({"decode_workers": "a:1,a:1"}, "names a:1 twice"),
        ({"prefill_workers": "a:1"}, "one process has one role"),
        ({"max_queue": 0}, "--max-queue is 0; expected at least 1"),
        ({"queue_timeout": 0.0}, "--queue-timeout is 0.0; expected a number above 0"),
        ({"slo_ttft_ms": float("nan")}, "--slo-ttft-ms is nan"),
        ({"split_min_tokens": -1}, "--split-min-tokens is -1; expected 0 or more"),
    ],
)
def test_refusals_name_the_flag(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RouterConfig(**({"decode_workers": "a:1"} | values))  # type: ignore[arg-type]  # mixed
    assert words in caught.value.message


def test_a_parent_can_hand_a_configuration_to_a_child() -> None:
    config = RouterConfig(decode_workers="a:1,b:2", max_queue=7, slo_tpot_ms=12.5)
    args = dict(arg[2:].replace("-", "_").split("=", 1) for arg in to_args(config))
    assert build(RouterConfig, args, env={}) == config
