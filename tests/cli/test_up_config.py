"""Which flags of `tasuki up` make sense together, and what they become."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from cli.up_config import UpConfig
from router.config import RouterConfig
from tasuki.config import WorkerConfig, add_flags, build
from tasuki.config_file import ConfigFile
from tasuki.errors import ConfigError


def config(*argv: str, env: dict[str, str] | None = None) -> UpConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, UpConfig)
    return build(UpConfig, vars(parser.parse_args(argv)), env or {})


@pytest.mark.parametrize(
    ("argv", "prefill", "decode"),
    [
        ([], 1, 1),
        (["--prefill", "3"], 3, 1),
        (["--prefill", "0", "--decode", "2"], 0, 2),
        (["--colocated", "2"], 0, 2),
        (["--colocated", "2", "--prefill", "0"], 0, 2),
    ],
)
def test_sizes(argv: list[str], prefill: int, decode: int) -> None:
    given = config(*argv)
    assert (given.num_prefill, given.num_decode) == (prefill, decode)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--colocated", "2", "--prefill", "1"], "--colocated 2 and --prefill 1"),
        (["--colocated", "2", "--decode", "2"], "--colocated 2 and --decode 2"),
        (["--colocated=-1"], "--colocated is -1"),
        (["--prefill=-1"], "--prefill is -1"),
        (["--decode", "0"], "--decode is 0; expected 1 or more"),
        (["--threads", "0"], "--threads is 0"),
        (["--port", "70000"], "--port is 70000"),
        (["--port", "http"], "--port is 'http'; expected a whole number"),
        (["--dtype", "int4"], "--dtype is 'int4'; expected one of float32"),
        (["--cpus", "x"], "--cpus holds 'x'"),
        (["--model", ""], "--model is empty"),
        (["--block-size", "0"], "--block-size is 0"),
        (["--start-timeout", "nan"], "--start-timeout is nan"),
        (["--stop-timeout", "0"], "--stop-timeout is 0"),
    ],
)
def test_refuses_in_words(argv: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(*argv)


def test_every_flag_is_an_environment_variable_and_a_flag_wins() -> None:
    env = {"TASUKI_PREFILL": "2", "TASUKI_PORT": "0", "TASUKI_JSON": "true"}
    given = config("--port", "6000", env=env)
    assert (given.num_prefill, given.port, given.json) == (2, 6000, True)


def test_settings_that_are_handed_on_keep_their_defaults() -> None:
    spec = config().spec(Path("m"), {})
    assert spec.worker == WorkerConfig()
    assert spec.router == RouterConfig(decode_workers="127.0.0.1:1")
    assert spec.router_config([], ["127.0.0.1:2"]).port == 50051
    assert spec.worker_config("decode-0").port == 0


def test_worker_settings_without_a_flag_of_ours_come_from_the_environment() -> None:
    env = {"TASUKI_LINK_TIMEOUT": "3.5", "TASUKI_MAX_QUEUE": "7", "TASUKI_MODEL": "tiny"}
    spec = config("--kv-blocks", "99", "--slo-ttft-ms", "50").spec(Path("m"), env)
    assert spec.worker_config("prefill-0").link_timeout == 3.5
    assert spec.worker_config("prefill-0").kv_blocks == 99
    assert spec.worker_config("prefill-0").model == "m"
    assert spec.router_config([], ["127.0.0.1:2"]).max_queue == 7
    assert spec.router_config([], ["127.0.0.1:2"]).slo_ttft_ms == 50


def test_a_bad_worker_setting_is_found_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="--slo-ttft-ms"):
        config("--slo-ttft-ms", "0").spec(Path("m"), {})


CLUSTER = """
up:
  prefill: 2
  kv-blocks: 50
worker:
  link_timeout: 3
  max-num-seqs: 9
  threads: 2
prefill:
  max_num_seqs: 4
decode:
  digests: false
router:
  max_queue: 7
"""


@pytest.fixture
def cluster_file(tmp_path: Path) -> str:
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    return str(file)


def with_file(file: str, *argv: str, env: dict[str, str] | None = None) -> UpConfig:
    """As the command line does: the file's own section stands behind flags and environment."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, UpConfig)
    given = vars(parser.parse_args(["--config", file, *argv]))
    return build(UpConfig, given, env or {}, ConfigFile(Path(file)).values(UpConfig, "up"))


def test_a_file_sets_what_is_given_nowhere_else(cluster_file: str) -> None:
    spec = with_file(cluster_file).spec(Path("m"), {})
    assert (spec.prefill, spec.decode) == (2, 1)
    prefill, decode = (spec.worker_config(name) for name in ("prefill-1", "decode-0"))
    assert (prefill.max_num_seqs, decode.max_num_seqs) == (4, 9)
    assert (prefill.digests, decode.digests) == (True, False)
    assert prefill.link_timeout == decode.link_timeout == 3
    assert prefill.threads == decode.threads == spec.threads == 2
    assert prefill.kv_blocks == decode.kv_blocks == 50
    assert spec.router_config([], ["127.0.0.1:2"]).max_queue == 7


def test_flags_and_environment_go_over_the_file(cluster_file: str) -> None:
    """Also a flag that says what would be the default anyway."""
    env = {"TASUKI_MAX_NUM_SEQS": "11", "TASUKI_MAX_QUEUE": "8"}
    spec = with_file(cluster_file, "--kv-blocks", "0", "--prefill", "1", env=env).spec(
        Path("m"), env
    )
    assert spec.prefill == 1
    assert with_file(cluster_file, "--threads", "1").spec(Path("m"), {}).threads == 1
    assert spec.worker_config("prefill-0").kv_blocks == 0
    assert spec.worker_config("prefill-0").max_num_seqs == 11
    assert spec.router_config([], ["127.0.0.1:2"]).max_queue == 8
