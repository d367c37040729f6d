"""The kernels' other forms: the same sources compiled as for processors without AVX-512."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/native/test_kernels.py", "tests/native/test_linear.py")


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("processor", "instructions"), [("x86-64-v3", "avx2"), ("x86-64", "plain")]
)
def test_older_processors(tmp_path: Path, processor: str, instructions: str) -> None:
    """In a process of its own, since a process loads the kernels once."""
    compiler = tmp_path / "cxx"
    compiler.write_text(f'#!/bin/bash\nexec g++ "${{@/-march=native/-march={processor}}}"\n')
    compiler.chmod(0o755)
    environment = os.environ | {"CXX": str(compiler), "TASUKI_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    (library,) = (tmp_path / "cache" / "native").glob("*.so")
    say = f"import torch; torch.ops.load_library({str(library)!r}); "
    told = subprocess.run(
        [sys.executable, "-c", say + "print(torch.ops.tasuki.instructions())"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert told.stdout.strip() == instructions  # or the wrapper did nothing
