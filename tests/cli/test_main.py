"""The entry point: help that teaches, exit codes, errors in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli.command import Command
from cli.main import COMMANDS, main
from tasuki import __version__
from tasuki.config import setting
from tasuki.errors import ConfigError, ModelError

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class EchoConfig:
    text: str = setting("", "What to say.")
    json: bool = setting(False, "As JSON.")


def echo(config: EchoConfig) -> int:
    if config.text == "model":
        raise ModelError("the model is broken")
    if config.text == "config":
        raise ConfigError("the text is wrong")
    if config.text == "interrupt":
        raise KeyboardInterrupt
    print(config.text)
    return 0


ECHO = Command(
    name="echo",
    summary="says it",
    help="Says it back.",
    config=EchoConfig,
    run=echo,
    positional="text",
)


@pytest.mark.parametrize(
    ("argv", "code", "out", "err"),
    [
        (["echo", "hello"], 0, "hello\n", ""),
        (["echo", "--text", "hello"], 0, "hello\n", ""),
        (["echo", "a", "--text", "b"], 2, "", "both given"),
        (["echo", "model"], 1, "", "tasuki echo: the model is broken\n"),
        (["echo", "config"], 2, "", "the text is wrong\n`tasuki echo --help`"),
        (["echo", "interrupt"], 130, "", ""),
        ([], 2, "", "Every flag is also an environment variable"),
    ],
)
def test_exit_codes(
    argv: list[str], code: int, out: str, err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv, commands=(ECHO,)) == code
    captured = capsys.readouterr()
    assert captured.out == out
    assert err in captured.err


@pytest.mark.parametrize(
    "argv", [["echo", "--tex", "abbreviated"], ["nothing"], ["echo", "--port", "1"]]
)
def test_unknown_words_are_usage_errors(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv, commands=(ECHO,))
    assert ended.value.code == 2
    assert "usage: tasuki" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_teaches(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command.name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"  tasuki {command.name} " in text, "an example to copy"
    assert "[TASUKI_" in text, "the environment variables"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"tasuki {__version__}\n"


def run_cli(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_never_imports_torch() -> None:
    done = run_cli("import sys, cli.main; print('torch' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_reader_that_goes_away_is_no_drama() -> None:
    code = (
        "import sys; from tests.cli.test_main import ECHO; from cli.main import main; "
        "sys.exit(main(['echo', 'x' * 100_000], commands=(ECHO,)))"
    )
    read_end, write_end = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(write_end)
        os.close(read_end)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, "")
