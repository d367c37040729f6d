"""What a Llama-family model directory says about itself, checked. Reads JSON only; never torch.

Knows both generations of `config.json` (`rope_parameters` and `dtype`, or `rope_scaling`,
`rope_theta` and `torch_dtype`). Everything that would change the arithmetic and is not implemented
is refused by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasuki.errors import ConfigError, ModelError
from tasuki.kv.layout import DTYPE_BYTES, KVLayout
from tasuki.model.fields import Fields, read_json

ARCHITECTURE = "LlamaForCausalLM"
KEY_TILE = 64  # positions per attention tile; a tile is a whole number of KV blocks

# Settings that change the arithmetic, and the values that leave it as it is implemented here.
_ONLY: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama", None),
    "quantization_config": (None,),
    "hidden_act": ("silu", "swish", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1.0, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_qk_norm": (False, None),
    "is_encoder_decoder": (False, None),
    "num_local_experts": (None,),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of one model. `model_id` is the name of its directory."""

    model_id: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: frozenset[int]

    @classmethod
    def from_directory(cls, path: Path) -> ModelConfig:
        """Read `config.json` and `generation_config.json`.

        Raises ModelError when the directory is no model, or one that is not supported.
        """
        fields = Fields(_config_file(path), read_json(_config_file(path)))
        _require_supported(fields)
        hidden_size = fields.positive("hidden_size")
        num_heads = fields.positive("num_attention_heads")
        vocab_size = fields.positive("vocab_size")
        config = cls(
            model_id=path.resolve().name,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=fields.positive("intermediate_size"),
            num_layers=fields.positive("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=fields.positive("num_key_value_heads", num_heads),
            head_dim=fields.positive("head_dim", hidden_size // num_heads),
            rms_norm_eps=fields.positive_number("rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(fields),
            max_position=fields.positive("max_position_embeddings", 2048),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            bos_token_id=_first(fields.token_ids("bos_token_id", vocab_size)),
            eos_token_ids=_eos_token_ids(path, fields, vocab_size),
        )
        _require_consistent(config, fields)
        return config

    def kv_layout(
        self, block_size: int, dtype: str = "float32", *, keys_transposed: bool = False
    ) -> KVLayout:
        """The shape of this model's KV. Raises ConfigError for an impossible block size."""
        if block_size < 1 or KEY_TILE % block_size:
            raise ConfigError(
                f"--block-size is {block_size}; expected a divisor of {KEY_TILE}, such as 16"
            )
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"--dtype is {dtype!r}; expected one of {', '.join(DTYPE_BYTES)}")
        return KVLayout(
            self.num_layers, self.num_kv_heads, self.head_dim, block_size, dtype, keys_transposed
        )

    def weight_bytes(self, dtype: str = "float32") -> int:
        """Bytes the loaded weights take. The head is packed, so it never shares the embeddings'
        memory.
        """
        attention = 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim
        mlp = 3 * self.hidden_size * self.intermediate_size
        per_layer = attention + mlp + 2 * self.hidden_size
        ends = 2 * self.vocab_size * self.hidden_size + self.hidden_size
        return (self.num_layers * per_layer + ends) * DTYPE_BYTES[dtype]


def _config_file(path: Path) -> Path:
    if not path.exists():
        raise ModelError(
            f"{path} does not exist; expected a model directory with config.json, safetensors "
            "weights and tokenizer.json"
        )
    if not path.is_dir():
        raise ModelError(f"{path} is a file; expected the directory that holds config.json")
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"{path} is no model directory: it has no config.json")
    return file


def _require_supported(fields: Fields) -> None:
    architectures = fields.raw("architectures")
    if architectures != [ARCHITECTURE]:
        found = ", ".join(map(str, architectures)) if isinstance(architectures, list) else "none"
        raise ModelError(
            f"{fields.file} names the architecture {found}; only {ARCHITECTURE} is supported"
        )
    for name, allowed in _ONLY.items():
        value = fields.raw(name)
        if not any(value is a or (type(value) is type(a) and value == a) for a in allowed):
            expected = " or ".join("absent" if a is None else repr(a) for a in allowed)
            raise ModelError(
                f"{fields.file} has {name} = {_short(value)}, which is not supported; "
                f"expected {expected}"
            )


def _rope_theta(fields: Fields) -> float:
    """The base of rotary positions, from either generation of config.json."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.section(name)
        kind = rope.raw("rope_type") or rope.raw("type") or "default"
        if kind != "default":
            raise ModelError(
                f"{fields.file} has {name} of type {_short(kind)}, which is not supported; only "
                "plain rotary positions ('default') are"
            )
        if rope.raw("partial_rotary_factor") not in (None, 1, 1.0):
            raise ModelError(
                f"{fields.file} has {name}.partial_rotary_factor, which is not supported; "
                "all dimensions of a head must rotate"
            )
        if rope.raw("rope_theta") is not None:
            return rope.positive_number("rope_theta", 0.0)
    return fields.positive_number("rope_theta", 10000.0)


def _eos_token_ids(path: Path, fields: Fields, vocab_size: int) -> frozenset[int]:
    """generation_config.json wins where it names any, as in the reference implementation."""
    file = path / "generation_config.json"
    if file.is_file():
        named = Fields(file, read_json(file)).token_ids("eos_token_id", vocab_size)
        if named:
            return frozenset(named)
    return frozenset(fields.token_ids("eos_token_id", vocab_size))


def _require_consistent(config: ModelConfig, fields: Fields) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{fields.file} has {config.num_heads} attention heads and {config.num_kv_heads} "
            "key/value heads; expected the first to be a multiple of the second"
        )
    if config.head_dim % 2:
        raise ModelError(
            f"{fields.file} gives head_dim {config.head_dim}; rotary positions need an even one"
        )
    if not math.isfinite(config.rope_theta):
        raise ModelError(f"{fields.file} gives rope_theta {config.rope_theta}; expected a number")


def _first(ids: list[int]) -> int | None:
    return ids[0] if ids else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
