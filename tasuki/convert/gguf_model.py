"""Reads a Llama, Qwen2 or Qwen3 out of a GGUF file: tensors by their Hugging Face names, and plain
JSON values. A Mistral is a Llama there.

Knows the container and its conventions; writes nothing. Never torch. What it cannot turn into the
very same model is refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tasuki.convert.gguf_rope import rope_parameters
from tasuki.convert.safetensors_file import StoredTensor
from tasuki.errors import ModelError

Array = np.ndarray[Any, np.dtype[np.float32]]
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
Q = gguf.GGMLQuantizationType
FLOATS = {Q.F32: "F32", Q.F16: "F16", Q.BF16: "BF16"}
READABLE = {*FLOATS, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0}
READABLE |= {Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K}
ROPE_FREQS = "rope_freqs.weight"
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
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except (OSError, ValueError, LookupError, ArithmeticError, MemoryError) as error:
            raise ModelError(f"{path} cannot be read as GGUF: {error}") from None
        self.kind = str(self.value("general.architecture"))
        if self.kind not in ARCHITECTURES:
            raise ModelError(
                f"{path} holds a {self.kind[:60]}; expected one of {', '.join(ARCHITECTURES)}"
            )
        parts = self.maybe("split.count")
        if parts not in (None, 0, 1):
            raise ModelError(
                f"{path} is one of {str(parts)[:20]} parts, which is not supported; "
                "merge them into one file, for example with llama-gguf-split"
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
        try:
            return None if field is None else field.contents()
        except ValueError as error:
            raise ModelError(f"{self.path} has a damaged {key}: {error}") from None

    def own(self, key: str) -> Any:
        """An entry of the model's kind, or None: `block_count` of `llama.block_count`."""
        return self.maybe(f"{self.kind}.{key}")

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number above zero of the model's kind."""
        value = self.own(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            found = "nothing" if value is None else str(value)[:60]
            raise ModelError(
                f"{self.path} has {found} as {self.kind}.{key}; expected a whole number above zero"
            )
        return value

    def tensors(self) -> list[StoredTensor]:
        """By Hugging Face names, [out, in]. Floats stay as they are; what is quantised becomes
        float32.
        """
        return [self._stored(t) for t in self._reader.tensors if t.name != ROPE_FREQS]

    def _stored(self, tensor: gguf.ReaderTensor) -> StoredTensor:
        kind = tensor.tensor_type
        if kind not in READABLE:
            raise ModelError(
                f"{self.path} holds {tensor.name} as {kind.name}, which is not supported; "
                f"expected one of {', '.join(sorted(k.name for k in READABLE))}: use another "
                "quantisation of the model"
            )
        shape = tuple(int(size) for size in reversed(tensor.shape))
        heads = self._heads_to_unpermute(tensor.name)
        if heads and (len(shape) != 2 or shape[0] % (2 * heads)):
            raise ModelError(
                f"{self.path} has {tensor.name} of shape {list(shape)}; expected two dimensions, "
                f"the first one for {heads} heads of an even size"
            )

        def read() -> np.ndarray[Any, Any]:
            values = tensor.data if kind in FLOATS else gguf.dequantize(tensor.data, kind)
            return unpermute(values, heads) if heads else values

        return StoredTensor(checkpoint_name(tensor.name), FLOATS.get(kind, "F32"), shape, read)

    def _heads_to_unpermute(self, name: str) -> int:
        """How many heads' rows the converter of this kind has put into another order; 0: none."""
        if self.kind != "llama":
            return 0
        if ".attn_q." in name:
            return self.number("attention.head_count")
        return self._kv_heads() if ".attn_k." in name else 0

    def _kv_heads(self) -> int:
        return self.number("attention.head_count_kv", self.number("attention.head_count"))

    def config(self, *, tied: bool, vocab_size: int) -> dict[str, Any]:
        """What config.json says of this model, end tokens apart."""
        hidden, heads = self.number("embedding_length"), self.number("attention.head_count")
        head_dim = self.number("attention.key_length", max(hidden // heads, 1))
        for key in ("rope.dimension_count", "attention.value_length"):
            if self.number(key, head_dim) != head_dim:
                raise ModelError(
                    f"{self.path} has {self.kind}.{key} {self.own(key)} for heads of {head_dim}, "
                    "which is not supported; expected both to be the same"
                )
        rope = rope_parameters(self.path, self.own, head_dim, self._rope_freqs())
        epsilon = self.own("attention.layer_norm_rms_epsilon")
        if not isinstance(epsilon, float):
            raise ModelError(f"{self.path} has no {self.kind}.attention.layer_norm_rms_epsilon")
        config = {
            "architectures": [ARCHITECTURES[self.kind]],
            "model_type": self.kind,
            "vocab_size": self.number("vocab_size", vocab_size),
            "hidden_size": hidden,
            "intermediate_size": self.number("feed_forward_length"),
            "num_hidden_layers": self.number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._kv_heads(),
            "head_dim": head_dim,
            "max_position_embeddings": self.number("context_length"),
            "rope_theta": rope["rope_theta"],
            "rope_parameters": rope,
            # Stored as float32 in the file; written as the number it was meant to be.
            "rms_norm_eps": float(f"{epsilon:.6g}"),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": tied,
            "torch_dtype": "float32",
        }
        window = self.own("attention.sliding_window")
        return config if not window else config | {"sliding_window": int(window)}

    def _rope_freqs(self) -> Array | None:
        for tensor in self._reader.tensors:
            if tensor.name == ROPE_FREQS:
                if tensor.tensor_type is not Q.F32:
                    raise ModelError(f"{self.path} holds {ROPE_FREQS} as no F32; expected that")
                return np.asarray(tensor.data, dtype=np.float32).reshape(-1)
        return None


def checkpoint_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if name in _ENDS:
        return _ENDS[name]
    match name.split("."):
        case ["blk", layer, part, "weight" | "bias" as what] if part in _LAYER:
            return f"model.layers.{layer}.{_LAYER[part]}.{what}"
    raise ModelError(f"the GGUF file has a tensor {name}, which is not supported")


def unpermute(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undo the order of rows that GGUF uses for rotary pairs: (pair, half) back to (half, pair)."""
    height, width = rows.shape
    pairs = rows.reshape(heads, height // heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(height, width)
