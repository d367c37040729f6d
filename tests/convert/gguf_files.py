"""Writes small GGUF files with the reference writer: a random model and a byte tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file
from tokenizers.pre_tokenizers import ByteLevel

from tasuki.convert.random_llama import RandomLlama, make_random_llama

Q = gguf.GGMLQuantizationType
SPEC = RandomLlama(
    vocab_size=264, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, max_position=512,
)  # fmt: skip
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
BYTES = sorted(ByteLevel.alphabet())
SPECIAL = ["<s>", "</s>", "<x>", "<y>"]
MERGES = ["a b", "h e", "1 2", "Ġ a"]


def original(folder: Path, spec: RandomLlama = SPEC) -> dict[str, np.ndarray[Any, Any]]:
    """The same model as a directory; returns its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    make_random_llama(folder, spec, seed=9)
    tensors: dict[str, np.ndarray[Any, Any]] = load_file(folder / "model.safetensors")
    return tensors


def permuted(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """As llama.cpp's converter orders q and k of a Llama: halves become pairs."""
    shape = rows.shape
    return rows.reshape(heads, 2, shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(shape)


def write_gguf(
    file: Path,
    tensors: dict[str, np.ndarray[Any, Any]],
    spec: RandomLlama = SPEC,
    *,
    quantisation: gguf.GGMLQuantizationType = Q.F32,
    pre: str = "gpt-2",
    tokenizer: str = "gpt2",
    kind: str | None = None,
    never_cut: Sequence[str] = (),
    rope_freqs: np.ndarray[Any, Any] | None = None,
    raw: tuple[gguf.GGMLQuantizationType, Mapping[str, np.ndarray[Any, Any]]] | None = None,
    **more: Any,
) -> Path:
    """`raw` are blocks that are quantised already; `never_cut` are tokens of their own."""
    kind = kind or spec.architecture[1]
    writer = gguf.GGUFWriter(file, kind)
    writer.add_context_length(spec.max_position)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(pre)
    tokens = [*BYTES, *SPECIAL, *(merge.replace(" ", "") for merge in MERGES), *never_cut]
    writer.add_token_list(tokens)
    types = {**dict.fromkeys(SPECIAL, 3), **dict.fromkeys(never_cut, 4)}
    writer.add_token_types([types.get(token, 1) for token in tokens])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    writer.add_chat_template("{{ messages[0].content }}")
    for key, value in more.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    for name, values in tensors.items():
        if raw is not None and name in raw[1]:
            writer.add_tensor(gguf_name(name), raw[1][name], raw_dtype=raw[0])
            continue
        if kind == "llama" and "q_proj" in name:
            values = permuted(values, spec.num_heads)
        elif kind == "llama" and "k_proj" in name:
            values = permuted(values, spec.num_kv_heads)
        kept = Q.F32 if values.ndim == 1 else quantisation
        data = gguf.quantize(values, kept) if kept is not Q.F32 else values
        writer.add_tensor(gguf_name(name), data, raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def gguf_name(name: str) -> str:
    stem, _, what = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{what}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{what}"
