"""Checkpoints: single and sharded, any float type; everything damaged is refused by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasuki.convert.random_llama import RandomLlama, make_random_llama
from tasuki.errors import ModelError
from tasuki.model.batch import Batch, BatchEntry
from tasuki.model.transformer import CausalLM
from tasuki.model.weights import weights_digest
from tests.model.paged import Paged

SPEC = RandomLlama(num_layers=2)
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    make_random_llama(tmp_path / "model", SPEC, seed=1)
    return tmp_path / "model"


def change(directory: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def set_config(directory: Path, **values: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def shard(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "model.safetensors").unlink()


def logits(directory: Path) -> torch.Tensor:
    paged = Paged(CausalLM.load(directory), 4)
    batch = Batch.build([BatchEntry([5, 6, 7], 0, [2], 1)], paged.layout)
    return paged.model.forward(batch, paged.cache)


def test_sharded_equals_single(directory: Path) -> None:
    single = logits(directory)
    shard(directory)
    assert torch.equal(logits(directory), single)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_any_float_type(directory: Path, dtype: torch.dtype) -> None:
    def convert(tensors: Tensors) -> None:
        for name in tensors:
            tensors[name] = tensors[name].to(dtype)

    change(directory, convert)
    stored = logits(directory)

    def widen(tensors: Tensors) -> None:
        for name in tensors:
            tensors[name] = tensors[name].float()

    change(directory, widen)
    assert torch.equal(stored, logits(directory))


def test_a_tied_head_may_be_stored_or_not(directory: Path) -> None:
    set_config(directory, tie_word_embeddings=True)
    stored = logits(directory)  # and is not looked at, as in the reference
    change(directory, lambda tensors: tensors.pop("lm_head.weight"))
    assert torch.equal(stored, logits(directory))
    set_config(directory, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        CausalLM.load(directory)


NORM = "model.layers.1.post_attention_layernorm.weight"
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop(NORM), f"no tensor {NORM}.*\\[64\\]"),
        (lambda t: t.update({Q: torch.zeros(64, 63)}), f"{Q}.*\\[64, 63\\].*\\[64, 64\\]"),
        (lambda t: t.update({Q: torch.zeros(64, 64, dtype=torch.int8)}), f"{Q}.*I8"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}), "bias"),
        (lambda t: t[Q].view(-1)[7:8].fill_(torch.nan), f"{Q}.*NaN"),
        (lambda t: t[Q].view(-1)[7:8].fill_(-torch.inf), f"{Q}.*infinite"),
    ],
    ids=["missing", "shape", "type", "unknown", "nan", "infinite"],
)
def test_damage_is_named(directory: Path, edit: Callable[[Tensors], object], words: str) -> None:
    change(directory, edit)
    with pytest.raises(ModelError, match=words):
        CausalLM.load(directory)


def test_old_rotary_buffers_are_ignored(directory: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(directory, lambda tensors: tensors.update({name: torch.ones(8)}))
    assert CausalLM.load(directory).config.num_layers == 2


def test_files_that_are_no_weights(directory: Path) -> None:
    file = directory / "model.safetensors"
    content = file.read_bytes()
    for damaged in (content[:1000], b"", b"\xff" * 64):
        file.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            CausalLM.load(directory)
    file.unlink()
    (directory / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(ModelError, match=r"\.bin files, which are never read"):
        CausalLM.load(directory)


def test_damaged_shards_are_named(directory: Path) -> None:
    shard(directory)
    two = directory / "two.safetensors"
    content = two.read_bytes()
    huge = (1 << 60).to_bytes(8, "little") + content[8:]
    for damaged in (content[:-100], content[:4], content + b"more", huge):
        two.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"two\.safetensors is no valid safetensors"):
            CausalLM.load(directory)
    two.write_bytes((directory / "one.safetensors").read_bytes())
    with pytest.raises(ModelError, match=r"in .*two\.safetensors and in .*one\.safetensors"):
        CausalLM.load(directory)


def test_a_shard_outside_the_directory_is_not_read(directory: Path) -> None:
    """Though it is there, and right: only the index decides what is opened."""
    shard(directory)
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    outside = directory.parent / "two.safetensors"
    shutil.copy(directory / "two.safetensors", outside)
    for name in ("../two.safetensors", str(outside), "..", ""):
        file.write_text(json.dumps(index | {"weight_map": index["weight_map"] | {Q: name}}))
        with pytest.raises(ModelError, match=re.escape(f"puts {Q} into")):
            CausalLM.load(directory)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "weight_map"),
        ({"weight_map": {Q: "../two.safetensors"}}, "file name"),
        ({"weight_map": {Q: 5}}, "file name"),
        ({"weight_map": {Q: "three.safetensors"}}, "missing"),
    ],
)
def test_a_damaged_index_is_named(directory: Path, content: object, words: str) -> None:
    shard(directory)
    (directory / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=words):
        CausalLM.load(directory)


def test_another_dtype_is_refused(directory: Path) -> None:
    with pytest.raises(
        ModelError, match="'float16' is not supported; expected float32 or bfloat16"
    ):
        CausalLM.load(directory, dtype="float16")


def test_digest(directory: Path) -> None:
    digest = weights_digest(directory)
    assert len(digest) == 32
    copy = directory.parent / "elsewhere"
    shutil.copytree(directory, copy)
    assert weights_digest(copy) == digest
    set_config(copy, torch_dtype="bfloat16", eos_token_id=3)  # neither touches KV
    assert weights_digest(copy) == digest
    set_config(copy, rms_norm_eps=1e-4)
    assert weights_digest(copy) != digest
    change(directory, lambda tensors: tensors[NORM][:1].add_(1e-3))
    assert weights_digest(directory) != digest
