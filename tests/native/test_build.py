"""The kernels are compiled once, by one process at a time; without a compiler things go on."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasuki.cache_root import cache_root
from tasuki.config import WorkerConfig
from tasuki.convert.tiny import make_tiny
from tasuki.engine.engine import Engine
from tasuki.native import build, library
from tasuki.native.build import NativeBuildError, ensure_library, library_path


@pytest.fixture
def own_loads() -> object:
    """`load` remembers per process what it found; not across these tests."""
    library.load.cache_clear()
    yield
    library.load.cache_clear()


def write_compiler(folder: Path, script: str) -> Path:
    path = folder / "cxx"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_a_built_library_is_found_again_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ensure_library(cache_root(os.environ))
    monkeypatch.setattr(build, "_compile", None)  # would fail
    assert ensure_library(cache_root(os.environ)) == first
    assert not first.with_suffix(".log").exists()


def test_the_name_depends_on_sources_and_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {library_path(tmp_path)}
    monkeypatch.setattr(build, "FLAGS", ("-O1",))
    names.add(library_path(tmp_path))
    monkeypatch.setattr(build, "_processor", lambda: "another one")
    names.add(library_path(tmp_path))
    assert len(names) == 3


def test_no_compiler_is_one_line_and_torch_computes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    own_loads: object,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TASUKI_CACHE", str(tmp_path / "cache"))
    model = make_tiny(tmp_path / "tiny")
    with caplog.at_level(logging.WARNING):
        engine = Engine.load(WorkerConfig(model=str(model)))
    assert engine.model.facts()["attention"].startswith("torch-tiles")
    (record,) = caplog.records
    assert "no-such-compiler is not on PATH" in record.message
    assert "\n" not in record.message


def test_a_failing_compiler_leaves_its_log_and_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = write_compiler(tmp_path, 'echo "cannot do $1" >&2; exit 3')
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NativeBuildError, match="log"):
        ensure_library(tmp_path / "cache")
    (log,) = (tmp_path / "cache" / "native").glob("*.log")
    assert "cannot do" in log.read_text()
    assert not list((tmp_path / "cache" / "native").glob("*.so"))


def test_a_compiler_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = write_compiler(tmp_path, '[ "$1" = -v ] || exec sleep 60')
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "COMPILE_SECONDS", 0.2)
    with pytest.raises(NativeBuildError, match=r"within 0\.2 s"):
        ensure_library(tmp_path / "cache")


def test_a_lock_that_is_never_freed_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = library_path(tmp_path)
    path.parent.mkdir(parents=True)
    monkeypatch.setattr(build, "LOCK_SECONDS", 0.2)
    with path.with_suffix(".lock").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(NativeBuildError, match="another process"):
            ensure_library(tmp_path)


def test_a_lock_dies_with_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own build lock is a file that stays; this one is not."""
    path = library_path(tmp_path)
    path.parent.mkdir(parents=True)
    lock = path.with_suffix(".lock")
    code = f"import fcntl, os; f = open({str(lock)!r}, 'wb'); fcntl.flock(f, 2); os._exit(1)"
    subprocess.run([sys.executable, "-c", code], check=False, timeout=30)
    assert lock.exists()
    monkeypatch.setattr(build, "_compile", lambda library: library.write_bytes(b"made"))
    assert ensure_library(tmp_path).read_bytes() == b"made"


def test_a_broken_library_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, own_loads: object
) -> None:
    path = library_path(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a library")
    assert not library.load(tmp_path)
    assert "without compiled kernels" in caplog.text


def test_native_can_be_turned_off(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "tiny")
    engine = Engine.load(WorkerConfig(model=str(model), native=False))
    assert engine.model.facts()["attention"].startswith("torch-tiles")
    assert engine.identity.layout_version == "block-major-1"
    assert Engine.load(WorkerConfig(model=str(model))).identity.layout_version == "block-major-2"
