"""What --model becomes: a checked path, or what a conversion process answers."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from cli.model_directory import check_directory, obtain_model
from tasuki.errors import ModelError

ANSWERS = """\
import sys, pathlib
name, root = sys.argv[-1], pathlib.Path(sys.argv[1])
print("looking at", name, file=sys.stderr)
if not (root / name).is_dir():
    print("cannot be downloaded", file=sys.stderr)
    sys.exit(2)
print("some chatter")
print(root / name)
"""


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    """A converter that answers with `tmp_path/NAME` where that is there, and fails otherwise."""
    script = tmp_path / "convert.py"
    script.write_text(ANSWERS)
    return [sys.executable, "-S", "-E", str(script), str(tmp_path)]


def make(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


@pytest.mark.parametrize("name", ["demo", "tiny"])
async def test_a_named_model_is_the_last_line_of_the_converter(
    tmp_path: Path, program: list[str], name: str
) -> None:
    directory = make(tmp_path / name)
    assert await obtain_model(name, program) == directory


async def test_auto_prefers_demo(tmp_path: Path, program: list[str]) -> None:
    make(tmp_path / "tiny")
    demo = make(tmp_path / "demo")
    assert await obtain_model("auto", program) == demo


async def test_auto_takes_tiny_with_a_clear_word(
    tmp_path: Path, program: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = make(tmp_path / "tiny")
    assert await obtain_model("auto", program) == tiny
    said = capsys.readouterr().err
    assert "model demo cannot be had: cannot be downloaded" in said
    assert "Using the tiny random model instead" in said
    assert said.count("cannot be downloaded") == 1
    assert "looking at tiny" in said


async def test_demo_does_not_fall_back(tmp_path: Path, program: list[str]) -> None:
    make(tmp_path / "tiny")
    with pytest.raises(ModelError, match="model demo cannot be had: cannot be downloaded"):
        await obtain_model("demo", program)


async def test_a_gguf_file_or_a_hub_name_goes_to_the_converter(
    tmp_path: Path, program: list[str]
) -> None:
    directory = make(tmp_path / "some.gguf")  # named after what was asked for, by the test's own
    assert await obtain_model("some.gguf", program) == directory
    with pytest.raises(ModelError, match="model owner/name cannot be had: cannot be downloaded"):
        await obtain_model("owner/name", program)


async def test_a_progress_bar_without_line_ends_is_no_line_of_any_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Downloads overwrite one line for minutes; a reader of lines gives up at 64 KiB."""
    script = tmp_path / "bar.py"
    script.write_text(
        "import sys\nsys.stderr.write('begun\\n')\n"
        "for n in range(50_000): sys.stderr.write(f'\\rfetching {n}')\n"
        "sys.stderr.write('\\n')\nprint(sys.argv[1])"
    )
    directory = make(tmp_path / "model")
    program = [sys.executable, "-S", "-E", str(script), str(directory)]
    assert await obtain_model("owner/name", program) == directory
    assert capsys.readouterr().err == "begun\nfetching 49999\n"


async def test_cancelling_ends_the_conversion(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text("import pathlib, sys, threading\npathlib.Path(sys.argv[1]).touch()\n"
                      "threading.Event().wait()")  # fmt: skip
    program = [sys.executable, "-S", "-E", str(script), str(tmp_path / "begun")]
    task = asyncio.ensure_future(obtain_model("demo", program))
    until = asyncio.get_running_loop().time() + 10
    while not (tmp_path / "begun").exists():
        assert asyncio.get_running_loop().time() < until
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # The rule for every test, that no child stays, does the rest.


def test_a_path_is_checked(tmp_path: Path) -> None:
    assert check_directory(make(tmp_path / "model")) == tmp_path / "model"
    with pytest.raises(ModelError, match="does not exist; expected auto, demo, tiny"):
        check_directory(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        check_directory(tmp_path)
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        check_directory(tmp_path / "model" / "config.json")
