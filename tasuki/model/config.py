"""What a model directory says about itself, checked. Reads JSON only; never torch.

Knows both generations of `config.json` (`rope_parameters` and `dtype`, or `rope_scaling`,
`rope_theta` and `torch_dtype`). Everything that would change the arithmetic and is not implemented
is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasuki.errors import ConfigError, ModelError
from tasuki.kv.layout import DTYPE_BYTES, KVLayout
from tasuki.model.family import FAMILIES, ONLY, Family
from tasuki.model.fields import Fields, read_json
from tasuki.model.rope import Rope

KEY_TILE = 64  # positions per attention tile; a tile is a whole number of KV blocks
MAX_LAYERS = 4096  # names of all their tensors are held before any is looked for
SLIDING = "sliding_attention"
FIRST_SLIDING_LAYER = 28  # where a Qwen that slides does not say


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of one model. `model_id` is its name for clients."""

    model_id: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position: int
    sliding_window: int | None = None  # no layer looks back further: serve no longer contexts
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: frozenset[int]

    @classmethod
    def from_directory(cls, path: Path) -> ModelConfig:
        """Read `config.json` and `generation_config.json`.

        Raises ModelError when the directory is no model, or one that is not supported.
        """
        fields = Fields(_config_file(path), read_json(_config_file(path)))
        family = _family(fields)
        hidden_size = fields.positive("hidden_size")
        num_heads = fields.positive("num_attention_heads")
        num_layers = fields.positive("num_hidden_layers", most=MAX_LAYERS)
        vocab_size = fields.positive("vocab_size")
        config = cls(
            model_id=_model_id(path.resolve()),
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=fields.positive("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.positive("num_key_value_heads", num_heads),
            head_dim=fields.positive("head_dim", family.head_dim or hidden_size // num_heads),
            rms_norm_eps=fields.positive_number("rms_norm_eps", 1e-6),
            rope=Rope.from_fields(fields),
            max_position=fields.positive("max_position_embeddings", 2048),
            sliding_window=_sliding_window(fields, family, num_layers),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
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
        heads = self.num_heads + 2 * self.num_kv_heads
        small = heads * self.qkv_bias + 2 * self.qk_norm
        per_layer = attention + mlp + 2 * self.hidden_size + small * self.head_dim
        ends = 2 * self.vocab_size * self.hidden_size + self.hidden_size
        return (self.num_layers * per_layer + ends) * DTYPE_BYTES[dtype]


def _model_id(path: Path) -> str:
    """The directory's name; in a hub's cache, where that is a revision, the name on the hub."""
    owner = path.parent.parent.name
    if path.parent.name == "snapshots" and owner.startswith("models--"):
        return owner.removeprefix("models--").replace("--", "/", 1)
    return path.name


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


def _family(fields: Fields) -> Family:
    architectures = fields.raw("architectures")
    named = architectures if isinstance(architectures, list) else []
    family = FAMILIES.get(named[0]) if len(named) == 1 and isinstance(named[0], str) else None
    if family is None:
        found = ", ".join(map(str, named)) or "none"
        raise ModelError(
            f"{fields.file} names the architecture {_short(found)}; "
            f"only {', '.join(FAMILIES)} are supported"
        )
    for name, allowed in {**ONLY, "model_type": (family.model_type, None)}.items():
        value = fields.raw(name)
        if not any(value is a or (type(value) is type(a) and value == a) for a in allowed):
            expected = " or ".join("absent" if a is None else repr(a) for a in allowed)
            raise ModelError(
                f"{fields.file} has {name} = {_short(value)}, which is not supported; "
                f"expected {expected}"
            )
    return family


def _sliding_window(fields: Fields, family: Family, num_layers: int) -> int | None:
    """Positions a layer can look back, where any layer is limited to fewer than all."""
    layers = fields.raw("layer_types")
    if layers is not None and not (isinstance(layers, list) and _known(layers)):
        raise ModelError(
            f"{fields.file} has layer_types {_short(layers)}, which are not supported; expected "
            f"'full_attention' or '{SLIDING}' for every layer"
        )
    if family.sliding_by_flag:
        if layers is None:
            first = fields.number("max_window_layers", FIRST_SLIDING_LAYER)
            slides = fields.flag("use_sliding_window", False) and first < num_layers
        else:
            slides = SLIDING in layers
        if not slides:
            return None
    if fields.raw("sliding_window") is None:
        return None if fields.has("sliding_window") else family.window
    return fields.positive("sliding_window")


def _known(layer_types: list[Any]) -> bool:
    return all(layer in ("full_attention", SLIDING) for layer in layer_types)


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


def _first(ids: list[int]) -> int | None:
    return ids[0] if ids else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
