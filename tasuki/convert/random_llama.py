"""Makes a model directory of the Llama family with random weights: of one seed, the same bytes.

For tests and experiments. Writes weights and config.json only; whoever calls adds a tokenizer. No
torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

# 0.02, the usual one, makes streams of one repeated token, where a wrong KV block can go unnoticed.
INITIALIZER_RANGE = 0.1


@dataclass(frozen=True, kw_only=True)
class RandomLlama:
    """Sizes of a model. `make_random_llama` turns them into a directory."""

    vocab_size: int = 260
    hidden_size: int = 64
    intermediate_size: int = 176
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    max_position: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    qkv_bias: bool = False  # as Qwen2 has
    qk_norm: bool = False  # as Qwen3 has

    @property
    def architecture(self) -> tuple[str, str]:
        """The name in config.json, and the model type."""
        if self.qk_norm:
            return "Qwen3ForCausalLM", "qwen3"
        return ("Qwen2ForCausalLM", "qwen2") if self.qkv_bias else ("LlamaForCausalLM", "llama")


def make_random_llama(directory: Path, spec: RandomLlama, *, seed: int = 0) -> None:
    """Write config.json and model.safetensors (float32) into `directory`, which must exist."""
    # Philox is counted, not stepped: its numbers are those of the key alone (and of numpy's
    # method).
    random = np.random.Generator(np.random.Philox(key=seed))

    def normal(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return random.standard_normal(shape, dtype=np.float32) * np.float32(INITIALIZER_RANGE)

    def ones() -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.ones(spec.hidden_size, dtype=np.float32)

    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    tensors = {"model.embed_tokens.weight": normal(spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": ones(),
            f"{prefix}.self_attn.q_proj.weight": normal(queries, hidden),
            f"{prefix}.self_attn.k_proj.weight": normal(keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": normal(keys, hidden),
            f"{prefix}.self_attn.o_proj.weight": normal(hidden, queries),
            f"{prefix}.post_attention_layernorm.weight": ones(),
            f"{prefix}.mlp.gate_proj.weight": normal(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": normal(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": normal(hidden, inner),
        }
        for name, width in (("q", queries), ("k", keys), ("v", keys)):
            if spec.qkv_bias:
                tensors[f"{prefix}.self_attn.{name}_proj.bias"] = normal(width)
            if spec.qk_norm and name != "v":
                tensors[f"{prefix}.self_attn.{name}_norm.weight"] = 1 + normal(spec.head_dim)
    tensors["model.norm.weight"] = ones()
    if not spec.tie_word_embeddings:
        tensors["lm_head.weight"] = normal(spec.vocab_size, hidden)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_json(directory / "config.json", config_json(spec))


def config_json(spec: RandomLlama) -> dict[str, Any]:
    """The config.json of a Llama, as transformers 5 and older both read it."""
    eos = list(spec.eos_token_ids)
    return {
        "architectures": [spec.architecture[0]],
        "model_type": spec.architecture[1],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position,
        "rope_theta": spec.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "rms_norm_eps": spec.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": INITIALIZER_RANGE,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "torch_dtype": "float32",
    }


def write_json(file: Path, value: Any) -> None:
    """The same bytes for the same value."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")
