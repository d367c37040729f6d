"""GGUF files become the model they were made from, or are refused by name."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tasuki.convert.gguf_directory import ensure_gguf
from tasuki.convert.resolve import resolve_model
from tasuki.errors import ModelError
from tasuki.model.config import ModelConfig
from tasuki.model.tokenizer import Tokenizer
from tasuki.model.transformer import CausalLM
from tests.convert.gguf_files import SPEC, Q, original, write_gguf
from tests.model.paged import Paged

NONE: frozenset[int] = frozenset()
FAMILIES = {
    "llama": SPEC,
    "qwen2": dataclasses.replace(SPEC, qkv_bias=True, tie_word_embeddings=True),
    "qwen3": dataclasses.replace(SPEC, qk_norm=True),
}


def logits(directory: Path) -> torch.Tensor:
    paged = Paged(CausalLM.load(directory), 30)
    run = paged.start(list(range(60)), 0)
    paged.prefill(run, iter([60]))
    return run.logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_comes_out_as_it_went_in(tmp_path: Path, family: str) -> None:
    spec = FAMILIES[family]
    tensors = original(tmp_path / "original", spec)
    file = write_gguf(tmp_path / "small.gguf", tensors, spec)
    directory = ensure_gguf(file, tmp_path / "cache")
    found = load_file(directory / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, values in tensors.items():
        assert np.array_equal(found[name], values), name
    mine, theirs = (
        dataclasses.replace(
            ModelConfig.from_directory(path), model_id="", bos_token_id=None, eos_token_ids=NONE
        )
        for path in (directory, tmp_path / "original")
    )
    assert mine == theirs
    assert torch.equal(logits(directory), logits(tmp_path / "original"))


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [(Q.F16, 1e-3), (Q.BF16, 1e-2), (Q.Q8_0, 1e-2), (Q.Q4_0, 0.2), (Q.Q4_1, 0.2)],
)
def test_quantised_tensors_are_near(tmp_path: Path, kind: Any, tolerance: float) -> None:
    tensors = original(tmp_path / "original")
    file = write_gguf(tmp_path / "small.gguf", tensors, quantisation=kind)
    found = load_file(ensure_gguf(file, tmp_path / "cache") / "model.safetensors")
    for name, values in tensors.items():
        assert np.abs(found[name] - values).max() <= tolerance * np.abs(values).max(), name


def test_tokenizer_ends_and_template(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "small.gguf", original(tmp_path / "original"))
    directory = ensure_gguf(file, tmp_path / "cache")
    tokenizer = Tokenizer.from_directory(directory)
    text = "he ab 12 é\n<s>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids[:-1]) == text.removesuffix("<s>")
    assert ids[0] == 264 - 3  # "he" was merged
    config = ModelConfig.from_directory(directory)
    assert config.bos_token_id == 256
    assert config.eos_token_ids == {257}
    assert (
        "content" in json.loads((directory / "tokenizer_config.json").read_text())["chat_template"]
    )


@pytest.mark.parametrize(
    ("pre", "expected"), [("smollm", 4), ("qwen2", 4), ("llama-bpe", 3), ("gpt-2", 2)]
)
def test_how_a_pre_tokenizer_cuts_digits(tmp_path: Path, pre: str, expected: int) -> None:
    """`1212` can merge into 12 12 only where its digits stay together."""
    file = write_gguf(tmp_path / "small.gguf", original(tmp_path / "original"), pre=pre)
    tokenizer = Tokenizer.from_directory(ensure_gguf(file, tmp_path / "cache"))
    assert len(tokenizer.encode("1212", add_special_tokens=False)) == expected


def test_a_bos_is_put_first_where_the_file_says_so(tmp_path: Path) -> None:
    tensors = original(tmp_path / "original")
    more: dict[str, Any] = {"tokenizer.ggml.add_bos_token": True}
    file = write_gguf(tmp_path / "small.gguf", tensors, **more)
    tokenizer = Tokenizer.from_directory(ensure_gguf(file, tmp_path / "cache"))
    assert tokenizer.encode("a", add_special_tokens=True)[0] == 256


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "gemma"}, "holds a gemma"),
        ({"pre": "falcon"}, "pre-tokenizer falcon"),
        ({"tokenizer": "llama"}, "tokenizer llama"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type yarn"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    file = write_gguf(tmp_path / "small.gguf", original(tmp_path / "original"), **settings)
    with pytest.raises(ModelError, match=words):
        ensure_gguf(file, tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    tensors = original(tmp_path / "original")
    file = write_gguf(tmp_path / "a.gguf", tensors)
    damaged = file.read_bytes().replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight")
    file.write_bytes(damaged)
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_xx\.weight, which is not supported"):
        ensure_gguf(file, tmp_path / "cache")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + b"\xff" * 200, b"\0" * 1000])
def test_damaged_files_are_errors(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=r"bad\.gguf"):
        ensure_gguf(file, tmp_path / "cache")


def test_a_conversion_happens_once_and_a_changed_file_anew(tmp_path: Path) -> None:
    tensors = original(tmp_path / "original")
    file = write_gguf(tmp_path / "small.gguf", tensors)
    first = ensure_gguf(file, tmp_path / "cache")
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert ensure_gguf(file, tmp_path / "cache") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    write_gguf(file, {**tensors, "model.norm.weight": tensors["model.norm.weight"] * 2})
    assert ensure_gguf(file, tmp_path / "cache") != first


# --- what --model may be --------------------------------------------------------------------------


def test_paths_go_first(tmp_path: Path) -> None:
    directory = tmp_path / "some" / "model"
    directory.mkdir(parents=True)
    assert resolve_model(str(directory)) == directory
    with pytest.raises(ModelError, match="which is no file"):
        resolve_model(str(tmp_path / "nothing.gguf"))
    with pytest.raises(ModelError, match=r"a model directory, a \.gguf file, or owner/name"):
        resolve_model(str(tmp_path / "nothing"))


def test_a_gguf_file_is_a_model(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "small.gguf", original(tmp_path / "original"))
    found = resolve_model(str(file), {"TASUKI_CACHE": str(tmp_path / "cache")})
    assert found.parent == tmp_path / "cache" / "models"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache as huggingface_hub lays it out, with one model, and no network."""
    import huggingface_hub.constants as constants

    repository = tmp_path / "hub" / "models--some--small.model"
    snapshot = repository / "snapshots" / ("a" * 40)
    original(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot


def test_a_model_in_the_hubs_cache_is_found_by_its_name(hub_cache: Path) -> None:
    assert resolve_model("some/small.model") == hub_cache
    assert ModelConfig.from_directory(hub_cache).model_id == "some/small.model"


def test_a_model_that_no_hub_has_is_one_clear_error(hub_cache: Path) -> None:
    with pytest.raises(ModelError, match="no hub can be reached"):
        resolve_model("some/other")
    assert "some" in os.listdir(hub_cache.parents[2])[0]
