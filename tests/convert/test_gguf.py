"""GGUF files become the model they were made from, or are refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tasuki.convert.gguf_directory import ensure_gguf
from tasuki.errors import ModelError
from tasuki.model.config import ModelConfig
from tasuki.model.rope import Rope
from tasuki.model.rotary import inverse_frequencies
from tasuki.model.transformer import CausalLM
from tasuki.text.tokenizer import Tokenizer
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
        assert np.array_equal(found[name].numpy(), values), name
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
        near = found[name].float().numpy()
        assert np.abs(near - values).max() <= tolerance * np.abs(values).max(), name


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


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "gemma"}, "holds a gemma"),
        ({"quantisation": Q.MXFP4}, "as MXFP4, which is not supported; expected one of .*Q6_K"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type yarn"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count 8 for heads of 16"),
        ({"llama.attention.value_length": 32}, "value_length 32 for heads of 16"),
        ({"llama.vocab_size": 0}, "0 as llama.vocab_size; expected a whole number above zero"),
        ({"llama.vocab_size": "many"}, "many as llama.vocab_size"),
        ({"split.count": 2}, "one of 2 parts"),
        ({"llama.rope.scaling.factor": "four"}, "rope.scaling.factor = four; expected a number"),
        ({"llama.rope.scale_linear": float("nan")}, "rope.scale_linear = nan; expected a number"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    file = write_gguf(tmp_path / "small.gguf", original(tmp_path / "original"), **settings)
    with pytest.raises(ModelError, match=words):
        ensure_gguf(file, tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]


@pytest.mark.parametrize(("kind", "block"), [(Q.Q4_K, 144), (Q.Q6_K, 210)])
def test_blocks_of_256_are_read(tmp_path: Path, kind: Any, block: int) -> None:
    """The reference writer cannot make these: random blocks, whose scales are made tame."""
    spec = dataclasses.replace(SPEC, hidden_size=256, intermediate_size=512)
    tensors = original(tmp_path / "original", spec)
    name = "model.layers.0.mlp.down_proj.weight"
    blocks = np.random.default_rng(3).integers(0, 256, (256, 2, block), dtype=np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes() * 2, np.uint8)
    blocks[..., :4] = scale if kind is Q.Q4_K else blocks[..., :4]
    blocks[..., -2:] = blocks[..., -2:] if kind is Q.Q4_K else scale[:2]
    raw = blocks.reshape(256, 2 * block)
    file = write_gguf(tmp_path / "small.gguf", tensors, spec, raw=(kind, {name: raw}))
    found = load_file(ensure_gguf(file, tmp_path / "cache") / "model.safetensors")
    assert found[name].shape == (256, 512)
    first = by_hand_q4_k(blocks[0, 0]) if kind is Q.Q4_K else by_hand_q6_k(blocks[0, 0])
    assert np.allclose(found[name][0, :256].numpy(), first, rtol=1e-6)


def by_hand_q4_k(block: np.ndarray[Any, Any]) -> list[float]:
    """256 values: eight groups of 32, each with a six-bit scale and a six-bit minimum."""
    d, dmin = (float(block[i : i + 2].view(np.float16)[0]) for i in (0, 2))
    s, q = [int(x) for x in block[4:16]], [int(x) for x in block[16:]]
    values = []
    for group in range(8):
        if group < 4:
            scale, least = s[group] & 63, s[group + 4] & 63
        else:
            scale = (s[group + 4] & 15) | (s[group - 4] >> 6 << 4)
            least = (s[group + 4] >> 4) | (s[group] >> 6 << 4)
        half = q[32 * (group // 2) : 32 * (group // 2) + 32]
        values += [d * scale * (x >> 4 if group % 2 else x & 15) - dmin * least for x in half]
    return values


def by_hand_q6_k(block: np.ndarray[Any, Any]) -> list[float]:
    """256 values: sixteen groups of 16 with a signed scale; four low bits, two high ones."""
    d = float(block[-2:].view(np.float16)[0])
    low, high = [int(x) for x in block[:128]], [int(x) for x in block[128:192]]
    scales = [int(x) for x in block[192:208].view(np.int8)]
    values = []
    for i in range(256):
        half, rest = divmod(i, 128)
        part, place = divmod(rest, 32)
        nibble = low[64 * half + 32 * (part % 2) + place] >> (4 * (part // 2)) & 15
        bits = high[32 * half + place] >> (2 * part) & 3
        values.append(d * scales[i // 16] * ((nibble | bits << 4) - 32))
    return values


def test_floats_stay_as_they_are(tmp_path: Path) -> None:
    for kind, dtype in ((Q.F16, torch.float16), (Q.BF16, torch.bfloat16)):
        tensors = original(tmp_path / "original")
        file = write_gguf(tmp_path / f"{dtype}.gguf", tensors, quantisation=kind)
        found = load_file(ensure_gguf(file, tmp_path / "cache") / "model.safetensors")
        for name, values in tensors.items():
            expected = torch.from_numpy(values)
            kept = expected if expected.ndim == 1 else expected.to(dtype)
            assert torch.equal(found[name], kept), name


def test_rotary_scaling(tmp_path: Path) -> None:
    tensors = original(tmp_path / "original")
    more: dict[str, Any] = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    file = write_gguf(tmp_path / "linear.gguf", tensors, **more)
    config = ModelConfig.from_directory(ensure_gguf(file, tmp_path / "cache"))
    assert (config.rope.kind, config.rope.factor) == ("linear", 4.0)

    plain = Rope(theta=SPEC.rope_theta)
    llama3 = dataclasses.replace(plain, kind="llama3", factor=8.0)
    divisors = inverse_frequencies(plain, 16) / inverse_frequencies(llama3, 16)
    assert 1 < len(set(divisors.tolist())) < 8  # some are kept, some are not
    file = write_gguf(tmp_path / "llama3.gguf", tensors, rope_freqs=divisors.numpy())
    config = ModelConfig.from_directory(ensure_gguf(file, tmp_path / "cache"))
    assert config.rope == llama3

    divisors[3] *= 1.01
    file = write_gguf(tmp_path / "other.gguf", tensors, rope_freqs=divisors.numpy())
    with pytest.raises(ModelError, match="rope_freqs that are not those of Llama 3"):
        ensure_gguf(file, tmp_path / "cache")


def test_biases_of_a_llama_are_refused(tmp_path: Path) -> None:
    """Its q and k are in another order, of which the reference does not say how biases follow."""
    spec = dataclasses.replace(SPEC, qkv_bias=True)
    file = write_gguf(tmp_path / "a.gguf", original(tmp_path / "o", spec), spec, kind="llama")
    with pytest.raises(ModelError, match=r"blk\.0\.attn_k\.bias of shape \[32\]"):
        ensure_gguf(file, tmp_path / "cache")


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
