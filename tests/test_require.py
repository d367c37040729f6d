"""The rules of TASUKI_REQUIRE, and that the check for leftovers finds what it is there to find."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from tests.leftovers import look, settle
from tests.require import require, required

ROOT = Path(__file__).resolve().parents[1]

SKIPPING = """\
import pytest
from tests.require import require

def test_skips():
    require("demo", False, "no demo model here")

@pytest.mark.skip(reason="not today")
def test_marked():
    pass

@pytest.mark.gpu
def test_gpu():
    require("gpu", False, "no CUDA device")

@pytest.mark.xfail(strict=True)
def test_known_fault():
    raise AssertionError
"""


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", set()),
        ("all", {"demo", "x"}),
        ("demo, x", {"demo", "x"}),
        ("gpu,all", {"gpu", "x", "demo"}),
    ],
)
def test_which_names_are_required(text: str, names: set[str]) -> None:
    env = {"TASUKI_REQUIRE": text}
    assert {name for name in ("demo", "x", "gpu") if required(name, env)} == names


def test_what_is_there_is_neither_skipped_nor_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASUKI_REQUIRE", "all")
    require("demo", True, "unused")


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        ("", "3 skipped, 1 xfailed"),
        ("demo", "1 failed, 2 skipped"),
        ("all", "1 failed, 1 skipped, 1 xfailed, 1 error"),
    ],
)
def test_a_skip_is_a_failure_where_everything_is_required(
    tmp_path: Path, value: str, outcome: str
) -> None:
    (tmp_path / "test_skipping.py").write_text(SKIPPING)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest",
         "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), str(tmp_path)],
        cwd=ROOT, env=os.environ | {"TASUKI_REQUIRE": value}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert outcome in done.stdout, done.stdout


def open_socket() -> Callable[[], None]:
    return socket.socket().close


def open_pipe() -> Callable[[], None]:
    ends = os.pipe()

    def end() -> None:
        for descriptor in ends:
            os.close(descriptor)

    return end


def start_thread() -> Callable[[], None]:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="tasuki-test", daemon=True)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join(10)

    return end


def start_child() -> Callable[[], None]:
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)

    def end() -> None:
        process.communicate(timeout=10)

    return end


def make_shared_memory() -> Callable[[], None]:
    memory = shared_memory.SharedMemory(create=True, size=4096)

    def end() -> None:
        with closing(memory):
            memory.unlink()

    return end


@pytest.mark.parametrize(
    ("leak", "word"),
    [
        (open_socket, "socket"),
        (open_pipe, "pipe"),
        (start_thread, "thread tasuki-test"),
        (start_child, "child process"),
        (make_shared_memory, "/dev/shm/"),
    ],
)
def test_a_planted_leak_is_found(leak: Callable[[], Callable[[], None]], word: str) -> None:
    before = look()
    give_back = leak()
    found = settle(before, seconds=0)
    give_back()
    assert any(word in line for line in found), found
    assert settle(before) == []
