"""Reads a Llama with a byte-level BPE tokenizer out of a GGUF file, as float32 and plain JSON
values.

Knows the container and its conventions; writes nothing. Never torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tasuki.errors import ModelError

Array = np.ndarray[Any, np.dtype[np.float32]]
CONTROL = 3  # token type of special tokens
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
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufLlama:
    """One open file. Raises ModelError when it is not what was expected."""

    def __init__(self, path: Path) -> None:
        try:
            self._reader = gguf.GGUFReader(path)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read as GGUF: {error}") from None
        self.path = path
        if self.value("general.architecture") != "llama":
            raise ModelError(f"{path} holds a {self.value('general.architecture')}; expected llama")

    def value(self, key: str) -> Any:
        """One entry of the header. Raises ModelError when it is not there."""
        field = self._reader.get_field(key)
        if field is None:
            raise ModelError(f"{self.path} has no {key}")
        return field.contents()

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Hugging Face names and dequantised tensors, [out, in]."""
        heads = int(self.value("llama.attention.head_count"))
        kv_heads = int(self.value("llama.attention.head_count_kv"))
        for tensor in self._reader.tensors:
            values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            if ".attn_q." in tensor.name:
                values = unpermute(values, heads)
            elif ".attn_k." in tensor.name:
                values = unpermute(values, kv_heads)
            yield checkpoint_name(tensor.name), np.ascontiguousarray(values)

    def tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer.

        The file only *names* its pre-tokenizer, `smollm`: every digit alone, then byte level.
        """
        if (name := self.value("tokenizer.ggml.pre")) != "smollm":
            raise ModelError(f"{self.path} names the pre-tokenizer {name}; expected smollm")
        tokens: list[str] = self.value("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self.value("tokenizer.ggml.merges")]
        vocab = {token: id_ for id_, token in enumerate(tokens)}
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        types = self.value("tokenizer.ggml.token_type")
        special = [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL]
        tokenizer.add_special_tokens(
            [tokenizers.AddedToken(text, normalized=False, special=True) for text in special]
        )
        return tokenizer


def checkpoint_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if name in _ENDS:
        return _ENDS[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _LAYER:
            return f"model.layers.{layer}.{_LAYER[part]}.weight"
    raise ModelError(f"the GGUF file has a tensor {name} that a Llama does not use")


def unpermute(rows: Array, heads: int) -> Array:
    """Undo the order of rows that GGUF uses for rotary pairs: (pair, half) back to (half, pair)."""
    height, width = rows.shape
    pairs = rows.reshape(heads, height // heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(height, width)
