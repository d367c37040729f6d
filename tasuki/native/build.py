"""Compiles the kernels once per machine, and says where the library is. Imports no torch.

The file's name is a digest of everything that decides what is in it: sources, torch, compiler,
processor. One process at a time builds; the others wait for it, with a deadline.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tasuki.errors import TasukiError

SOURCES = ("ops.cpp", "attention.h", "linear.h", "rows.h", "lanes.h")
FLAGS = (
    "-std=c++20", "-O3", "-march=native", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno",
    # A product and a sum are fused where the source says so, and nowhere else: or a row's bits
    # would depend on which copy of a loop it went through.
    "-ffp-contract=off",
)  # fmt: skip
LOCK_SECONDS = 300.0
COMPILE_SECONDS = 240.0
POLL_SECONDS = 0.1
HERE = Path(__file__).parent


class NativeBuildError(TasukiError):
    """The kernels cannot be compiled here; everything works without them, slower."""

    default_reason = "native"


def compiler() -> str:
    """The C++ compiler's path. Raises NativeBuildError when there is none."""
    wanted = os.environ.get("CXX", "g++")
    found = shutil.which(wanted)
    if found is None:
        raise NativeBuildError(
            f"no C++ compiler: {wanted} is not on PATH; install one "
            "(Debian: apt-get install -y g++)"
        )
    return found


def library_path(cache: Path) -> Path:
    """Where the library for this machine is, or would be. Raises NativeBuildError."""
    version = subprocess.run(
        [compiler(), "-v"], capture_output=True, text=True, check=False, timeout=30
    )
    digest = hashlib.blake2b(digest_size=12)
    for name in SOURCES:
        digest.update((HERE / name).read_bytes())
    for fact in (
        importlib.metadata.version("torch"), version.stderr, repr(FLAGS), _processor(),
    ):  # fmt: skip
        digest.update(fact.encode() + b"\0")
    return cache / "native" / f"tasuki-{digest.hexdigest()}.so"


def ensure_library(cache: Path) -> Path:
    """The path of the compiled library, building it first where needed.

    Raises NativeBuildError, which names the compiler's log when there is one.
    """
    library = library_path(cache)
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with _lock(library.with_suffix(".lock")):
        if not library.exists():
            _compile(library)
    return library


def _processor() -> str:
    """What -march=native looks at."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    wanted = ("model name", "flags", "Features")
    facts = {line.partition(":")[0].strip(): line for line in reversed(lines)}
    return platform.machine() + "".join(facts.get(name, "") for name in wanted)


def _compile(library: Path) -> None:
    torch_folder = _torch_folder()
    log = library.with_suffix(".log")
    handle, name = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    includes = [torch_folder / "include", torch_folder / "include/torch/csrc/api/include"]
    command = [
        compiler(), *FLAGS, *(f"-I{path}" for path in includes), str(HERE / "ops.cpp"),
        "-o", name, f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    try:
        with log.open("wb") as output:
            done = subprocess.run(
                command, stdout=output, stderr=output, check=False, timeout=COMPILE_SECONDS
            )
        if done.returncode:
            raise NativeBuildError(f"the kernels do not compile here; the compiler says in {log}")
        os.replace(name, library)
        log.unlink(missing_ok=True)
    except subprocess.TimeoutExpired:
        raise NativeBuildError(f"the compiler did not end within {COMPILE_SECONDS:g} s") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NativeBuildError("torch is not installed")
    return Path(spec.origin).parent


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process; freed by the system if that one dies."""
    until = time.monotonic() + LOCK_SECONDS
    with path.open("wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise NativeBuildError(
                        f"another process has held {path} for {LOCK_SECONDS:g} s; stop it, or "
                        "start with --no-native"
                    ) from None
                time.sleep(POLL_SECONDS)
        yield
