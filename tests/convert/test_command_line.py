"""`python -m tasuki.convert`, as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def convert(*argv: str, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tasuki.convert", *argv],
        cwd=ROOT, env=os.environ | {"TASUKI_CACHE": str(cache)},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_the_last_line_is_the_directory_and_a_second_run_finds_it(tmp_path: Path) -> None:
    first = convert("tiny", cache=tmp_path)
    assert first.returncode == 0, first.stderr
    directory = Path(first.stdout.splitlines()[-1])
    assert directory.is_relative_to(tmp_path)
    assert (directory / "config.json").is_file()
    made = (directory / "config.json").stat().st_mtime_ns
    second = convert("tiny", cache=tmp_path)
    assert second.stdout.splitlines()[-1] == str(directory)
    assert (directory / "config.json").stat().st_mtime_ns == made


def test_an_unusable_cache_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = convert("tiny", cache=tmp_path / "file")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "expected a directory" in done.stderr


def test_the_end_of_the_lifeline_ends_it_and_what_it_started() -> None:
    code = (
        "import subprocess, sys, threading; from tasuki.convert.__main__ import _watch; "
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'input()'], stdin=subprocess.PIPE);"
        "print('up', flush=True); _watch(int(sys.argv[1])); threading.Event().wait()"
    )
    read_end, write_end = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", code, str(read_end)],
        cwd=ROOT, pass_fds=(read_end,), stdout=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        os.close(read_end)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        os.close(write_end)
        # Its child holds stdout too, so the end of the stream means that both are gone.
        assert process.stdout.read() == b""
        assert process.wait(timeout=10) == -9
