"""Which tensors a model has, read from a checkpoint into the merged form the transformer computes
with.

Knows names and shapes; knows nothing about how products are computed.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash

from tasuki.errors import ModelError
from tasuki.model.checkpoint import Checkpoint, weight_files
from tasuki.model.config import ModelConfig

_CHUNK = 16 << 20


@dataclass(frozen=True)
class LayerTensors:
    """Dense float32 weights of one layer, [out, in]; q, k, v and gate, up merged along `out`."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None  # merged like the weights
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the model must have, by its name in the checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        shapes |= {_layer(layer, name): shape for name, shape in _layer_shapes(config).items()}
    return shapes


def _layer(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{name}"


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.qkv_bias:
        shapes["self_attn.q_proj.bias"] = (queries,)
        shapes["self_attn.k_proj.bias"] = shapes["self_attn.v_proj.bias"] = (keys,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


class ModelWeights:
    """The checkpoint of one model, complete and of the right shapes before anything is read."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._shapes = expected_shapes(config)
        for name, shape in self._shapes.items():
            checkpoint.require(name, shape)
        unknown = sorted(filter(self._is_unknown, checkpoint.names()))
        if unknown:
            raise ModelError(
                f"{checkpoint.directory} has {len(unknown)} tensors that this model does not use, "
                f"such as {unknown[0]}; ignoring them would change the results"
            )

    def _is_unknown(self, name: str) -> bool:
        # A tied head may be stored all the same; old checkpoints store the rotary frequencies.
        harmless = name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")
        return name not in self._shapes and not harmless

    def _read(self, name: str) -> torch.Tensor:
        return self._checkpoint.read(name, self._shapes[name])

    def embedding(self) -> torch.Tensor:
        """[vocab_size, hidden_size]."""
        return self._read("model.embed_tokens.weight")

    def final_norm(self) -> torch.Tensor:
        return self._read("model.norm.weight")

    def head(self) -> torch.Tensor | None:
        """[vocab_size, hidden_size], or None when it is the embedding."""
        return None if self._config.tie_word_embeddings else self._read("lm_head.weight")

    def layers(self) -> Iterator[LayerTensors]:
        """One layer at a time, so that no more than one is dense in memory."""
        for layer in range(self._config.num_layers):
            tensor = {name: self._read(_layer(layer, name)) for name in _layer_shapes(self._config)}
            bias = None
            if self._config.qkv_bias:
                bias = torch.cat([tensor[f"self_attn.{x}_proj.bias"] for x in "qkv"])
            yield LayerTensors(
                attention_norm=tensor["input_layernorm.weight"],
                qkv=torch.cat([tensor[f"self_attn.{x}_proj.weight"] for x in "qkv"]),
                output=tensor["self_attn.o_proj.weight"],
                mlp_norm=tensor["post_attention_layernorm.weight"],
                gate_up=torch.cat([tensor[f"mlp.{x}_proj.weight"] for x in ("gate", "up")]),
                down=tensor["mlp.down_proj.weight"],
                qkv_bias=bias,
                q_norm=tensor.get("self_attn.q_norm.weight"),
                k_norm=tensor.get("self_attn.k_norm.weight"),
            )


def weights_digest(directory: Path) -> str:
    """xxh3-128, in hex, over every byte of the weight files and the constants of config.json.

    Two workers with the same digest compute the same KV. Raises ModelError as loading would.
    """
    digest = xxhash.xxh3_128()
    # The name of the directory may differ between machines, and end tokens do not touch KV.
    config = replace(
        ModelConfig.from_directory(directory),
        model_id="", bos_token_id=None, eos_token_ids=frozenset(),
    )  # fmt: skip
    digest.update(repr(config).encode())
    for path in weight_files(directory):
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            memoryview(content) as view,
        ):
            for start in range(0, len(view), _CHUNK):
                digest.update(view[start : start + _CHUNK])
    return digest.hexdigest()
