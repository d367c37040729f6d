"""One YAML file for all processes: what it may hold, and every way in which it can be wrong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tasuki.config import WorkerConfig, build, given_names, load, setting, without_settings
from tasuki.config_file import MAX_BYTES, ConfigFile
from tasuki.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Example:
    port: int = setting(5, "A port.")
    ratio: float = setting(0.5, "A ratio.")
    shout: bool = setting(False, "A switch.")
    name: str = setting("", "A name.")
    long_name: str = setting("", "A name of two words.")
    config: str = setting("", "A file.")
    ready_fd: int = setting(-1, "A descriptor.")


def write(folder: Path, content: str | bytes) -> Path:
    file = folder / "cluster.yaml"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def read(folder: Path, content: str, *sections: str, **given: object) -> Example:
    file = ConfigFile(write(folder, content))
    return build(Example, given, {}, file.values(Example, *(sections or ("worker", "decode"))))


def test_a_role_goes_over_what_both_share_and_defaults_go_last(tmp_path: Path) -> None:
    text = "worker: {port: 7, ratio: 2, name: both}\ndecode:\n  name: own\n  shout: true\n"
    assert read(tmp_path, text) == Example(port=7, ratio=2.0, name="own", shout=True)
    assert read(tmp_path, text, "worker") == Example(port=7, ratio=2.0, name="both")


def test_flag_over_environment_over_file(tmp_path: Path) -> None:
    values = ConfigFile(write(tmp_path, "worker: {port: 1, ratio: 1, name: f}")).values(
        Example, "worker"
    )
    made = build(Example, {"port": "3"}, {"TASUKI_PORT": "2", "TASUKI_RATIO": "2"}, values)
    assert made == Example(port=3, ratio=2.0, name="f")
    assert given_names(made) == {"port", "ratio", "name"}


@pytest.mark.parametrize("text", ["", "---", "# nothing", "worker:\ndecode: {}\n"])
def test_an_empty_file_sets_nothing(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text) == Example()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("worker: {prot: 1}", r"worker\.prot, which is no setting; did you mean port\?"),
        ("wroker: {port: 1}", r"section 'wroker'; did you mean worker\?"),
        ("5: {port: 1}", "section '5'"),
        ("worker: 5", "no settings under worker"),
        ("worker: [port]", "no settings under worker"),
        ("- worker", "holds a list"),
        ("just words", "holds a str"),
        ("worker: {port: true}", r"worker\.port in .* is .*True.*expected a whole number"),
        ("worker: {port: 1.5}", r"worker\.port in .*expected a whole number"),
        ("worker: {port: '7'}", r"worker\.port in .* is '7'; expected a whole number"),
        ("worker: {port: 1, decode: 2}", r"worker\.decode, which is no setting"),
        ("worker: {ratio: true}", r"worker\.ratio in .* is True; expected a number"),
        ("worker: {ratio: '1'}", r"worker\.ratio in .*expected a number"),
        ("worker: {name: yes}", r"worker\.name in .* is True; expected text"),
        ("worker: {name: 1.0}", r"worker\.name in .* is 1.0; expected text"),
        ("worker: {shout: 5}", r"worker\.shout in .*expected true or false"),
        ("worker: {shout: 1}", r"worker\.shout in .* is 1; expected true or false"),
        ("worker: {shout: 'yes'}", r"worker\.shout in .* is 'yes'; expected true or false"),
        ("worker: {long-name: a, long_name: b}", r"worker\.long_name twice, with dashes"),
        ("worker: {ready-fd: 1}", r"worker\.ready-fd, which is no setting"),
        ("worker: {config: other.yaml}", r"worker\.config, which is no setting"),
        ("worker: {? [port] : 1}", "no valid YAML.*a name before the colon"),
        ("worker: {? {a: 1} : 1}", "no valid YAML.*a name before the colon"),
        ("worker: !!set {port}", "no settings under worker"),
        ("worker: {name: 2020-99-99}", "no valid YAML"),
        ("worker: {name: !!timestamp soon}", "no valid YAML"),
        ("worker: {port: !!int many}", "no valid YAML"),
        ("worker: {port: " + "9" * 9999 + "}", "no valid YAML"),
        ("worker: {name: a\0b}", "no valid YAML"),
        ("worker: {port: [1]}", r"worker\.port = .*single value"),
        ("worker: {port: null}", r"worker\.port = .*single value"),
        ("worker: {name: 2020-01-01}", r"worker\.name = .*single value"),
        ("worker: {port: 1, port: 2}", "'port' stands twice"),
        ("worker: {port: 1}\nworker: {port: 2}", "'worker' stands twice"),
        ("worker: &a {port: 1}\ndecode: *a", "aliases are not taken"),
        ("worker: {name: !!python/object/apply:os.system [ls]}", "no valid YAML"),
        ("worker: {port: 1", "no valid YAML"),
        ("[" * 5000, "nested too deeply|no valid YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        ConfigFile(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="not UTF-8"):
        ConfigFile(write(tmp_path, b"worker: {name: \xff}"))
    with pytest.raises(ConfigError, match="bytes; expected a short"):
        ConfigFile(write(tmp_path, "#" * (MAX_BYTES + 1)))
    with pytest.raises(ConfigError, match="directory"):
        ConfigFile(tmp_path)


def test_a_process_reads_its_sections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, "worker: {max-num-seqs: 5}\ndecode: {block_size: 32}\nrouter: {port: 1}")
    sections = ("worker", "decode")
    config = load(WorkerConfig, "x", "y", ["--config", str(file)], sections)
    assert (config.max_num_seqs, config.block_size, config.port) == (5, 32, 0)
    monkeypatch.setenv("TASUKI_CONFIG", str(file))
    assert load(WorkerConfig, "x", "y", [], sections) == config
    assert load(WorkerConfig, "x", "y", ["--block-size=16"], sections).block_size == 16
    write(tmp_path, "decode: {blocksize: 1}")
    with pytest.raises(SystemExit):
        load(WorkerConfig, "x", "y", [], sections)
    assert "did you mean block_size?" in capsys.readouterr().err


def test_a_child_inherits_no_setting() -> None:
    env = {"TASUKI_PORT": "1", "TASUKI_CONFIG": "f", "TASUKI_CACHE": "c", "HOME": "h"}
    assert without_settings(env, WorkerConfig) == {"TASUKI_CACHE": "c", "HOME": "h"}
