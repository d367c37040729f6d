"""A directory appears complete or not at all, and one process makes it at a time."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tasuki.convert.draft import draft, locked, sweep
from tasuki.errors import ModelError


def test_it_appears_complete(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    with draft(target) as work:
        (work / "a").write_text("1")
        assert not target.exists()
    assert [file.name for file in target.iterdir()] == ["a"]
    with draft(target) as work:  # and is replaced whole
        (work / "b").write_text("2")
        assert (target / "a").exists()
    assert [file.name for file in target.iterdir()] == ["b"]
    assert [entry.name for entry in target.parent.iterdir()] == ["model"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for make in (draft(tmp_path / "file" / "model"), locked(tmp_path / "file" / "model", 1.0)):
        with pytest.raises(ModelError, match=r"file cannot be written: .*; set TASUKI_CACHE"), make:
            pass


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with draft(tmp_path / "model") as work:
            (work / "a").write_text("1")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_the_lock_has_a_deadline(tmp_path: Path) -> None:
    with locked(tmp_path / "model", 1.0):
        with pytest.raises(ModelError, match="another process"), locked(tmp_path / "model", 0.0):
            pass
        with locked(tmp_path / "other", 0.0):
            pass
    with locked(tmp_path / "model", 0.0):
        pass


def test_whoever_waits_gets_it(tmp_path: Path) -> None:
    order: list[str] = []
    waiting = threading.Event()

    def second() -> None:
        waiting.set()
        with locked(tmp_path / "model", 30.0):
            order.append("second")

    with locked(tmp_path / "model", 0.0):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(10)
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]


def test_what_a_killed_process_left_is_swept_away(tmp_path: Path) -> None:
    directory = tmp_path / "model[1]"
    script = (
        "import os, signal, sys, pathlib; from tasuki.convert.draft import draft\n"
        "with draft(pathlib.Path(sys.argv[1])) as work:\n"
        "    (work / 'half').write_text('x'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(directory)], check=False, timeout=30)
    (tmp_path / ".model[1].and.another").mkdir()  # another model's
    with locked(directory, 1.0):
        assert len([*tmp_path.glob(".model*")]) == 3
        sweep(directory)
    assert {path.name for path in tmp_path.iterdir()} == {".model[1].lock", ".model[1].and.another"}
