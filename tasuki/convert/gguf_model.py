"""Reads a Llama, Qwen2 or Qwen3 with a byte-level BPE tokenizer out of a GGUF file: float32 tensors
by their Hugging Face names, and plain JSON values.

Knows the container and its conventions; writes nothing. Never torch. What it cannot turn into the
very same model is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tasuki.errors import ModelError

Array = np.ndarray[Any, np.dtype[np.float32]]
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Names of tensors outside and inside a layer, here and in a Hugging Face checkpoint.
_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufModel:
    """One open file. Raises ModelError when it is not what was expected."""

    def __init__(self, path: Path) -> None:
        try:
            self._reader = gguf.GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise ModelError(f"{path} cannot be read as GGUF: {error}") from None
        self.path = path
        self.kind = str(self.value("general.architecture"))
        if self.kind not in ARCHITECTURES:
            raise ModelError(
                f"{path} holds a {self.kind[:60]}; expected one of {', '.join(ARCHITECTURES)}"
            )

    def value(self, key: str) -> Any:
        """One entry of the header. Raises ModelError when it is not there."""
        found = self.maybe(key)
        if found is None:
            raise ModelError(f"{self.path} has no {key}")
        return found

    def maybe(self, key: str) -> Any:
        """The same, or None."""
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def own(self, key: str) -> Any:
        """An entry of the model's kind: `block_count` of `llama.block_count`."""
        return self.value(f"{self.kind}.{key}")

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Hugging Face names and dequantised tensors, [out, in]."""
        heads = int(self.own("attention.head_count"))
        kv_heads = int(self.own("attention.head_count_kv"))
        for tensor in self._reader.tensors:
            try:
                values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            except NotImplementedError:
                raise ModelError(
                    f"{self.path} holds {tensor.name} as {tensor.tensor_type.name}, which is not "
                    "supported; use another quantisation of the model"
                ) from None
            if self.kind == "llama" and ".attn_q." in tensor.name:
                values = unpermute(values, heads)
            elif self.kind == "llama" and ".attn_k." in tensor.name:
                values = unpermute(values, kv_heads)
            yield checkpoint_name(tensor.name), np.ascontiguousarray(values)

    def config(self, *, tied: bool, vocab_size: int) -> dict[str, Any]:
        """What config.json says of this model, end tokens apart."""
        scaling = self.maybe(f"{self.kind}.rope.scaling.type")
        if scaling not in (None, "none"):
            raise ModelError(
                f"{self.path} has rope.scaling.type {str(scaling)[:60]}, which is not supported"
            )
        theta = float(self.maybe(f"{self.kind}.rope.freq_base") or 10000.0)
        hidden, heads = int(self.own("embedding_length")), int(self.own("attention.head_count"))
        head_dim = (
            self.maybe(f"{self.kind}.attention.key_length")
            or self.maybe(f"{self.kind}.rope.dimension_count")
            or hidden // heads
        )
        config = {
            "architectures": [ARCHITECTURES[self.kind]],
            "model_type": self.kind,
            "vocab_size": int(self.maybe(f"{self.kind}.vocab_size") or vocab_size),
            "hidden_size": hidden,
            "intermediate_size": int(self.own("feed_forward_length")),
            "num_hidden_layers": int(self.own("block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self.own("attention.head_count_kv")),
            "head_dim": int(head_dim),
            "max_position_embeddings": int(self.own("context_length")),
            "rope_theta": theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            # Stored as float32 in the file; written as the number it was meant to be.
            "rms_norm_eps": float(f"{self.own('attention.layer_norm_rms_epsilon'):.6g}"),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": tied,
            "torch_dtype": "float32",
        }
        window = self.maybe(f"{self.kind}.attention.sliding_window")
        return config if window is None else config | {"sliding_window": int(window)}


def checkpoint_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if name in _ENDS:
        return _ENDS[name]
    match name.split("."):
        case ["blk", layer, part, "weight" | "bias" as what] if part in _LAYER:
            return f"model.layers.{layer}.{_LAYER[part]}.{what}"
    raise ModelError(f"the GGUF file has a tensor {name}, which is not supported")


def unpermute(rows: Array, heads: int) -> Array:
    """Undo the order of rows that GGUF uses for rotary pairs: (pair, half) back to (half, pair)."""
    height, width = rows.shape
    pairs = rows.reshape(heads, height // heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(height, width)
