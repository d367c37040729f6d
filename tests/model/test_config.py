"""ModelConfig: both generations of config.json, and everything else refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasuki.errors import ConfigError, ModelError
from tasuki.model.config import ModelConfig

OLD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def write(directory: Path, values: Any, **more: Any) -> Path:
    merged = {k: v for k, v in (values | more).items() if v != "absent"}
    (directory / "config.json").write_text(json.dumps(merged))
    return directory


def test_old_style(tmp_path: Path) -> None:
    config = ModelConfig.from_directory(write(tmp_path, OLD))
    assert config.model_id == tmp_path.name
    assert (config.head_dim, config.num_kv_heads, config.rope.theta) == (16, 2, 5000.0)
    assert config.eos_token_ids == {2}
    assert not config.tie_word_embeddings


def test_new_style(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 7000.0}
    new = OLD | {"rope_parameters": rope, "dtype": "float32", "head_dim": 24}
    write(tmp_path, new, rope_theta="absent", rope_scaling="absent", torch_dtype="absent")
    config = ModelConfig.from_directory(tmp_path)
    assert (config.rope.theta, config.head_dim) == (7000.0, 24)


def test_what_may_be_absent(tmp_path: Path) -> None:
    absent = ("num_key_value_heads", "rope_theta", "eos_token_id", "hidden_act", "model_type")
    config = ModelConfig.from_directory(write(tmp_path, OLD, **dict.fromkeys(absent, "absent")))
    assert (config.num_kv_heads, config.rope.theta) == (4, 10000.0)
    assert config.eos_token_ids == frozenset()


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [(2, None, {2}), ([2, 3], None, {2, 3}), (2, [5, 6], {5, 6}), (None, 7, {7}), (4, "none", {4})],
)
def test_end_tokens(tmp_path: Path, own: Any, generation: Any, expected: set[int]) -> None:
    write(tmp_path, OLD, eos_token_id=own)
    if generation is not None:
        values = {} if generation == "none" else {"eos_token_id": generation}
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("architectures", ["GemmaForCausalLM"]),
        ("architectures", ["LlamaForCausalLM", "LlamaForCausalLM"]),
        ("architectures", [5]),
        ("architectures", "absent"),
        ("model_type", "mixtral"),
        ("quantization_config", {"quant_method": "gptq"}),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("layer_types", ["full_attention", "linear_attention"]),
        ("layer_types", ["full_attention", {}]),
        ("layer_types", "full_attention"),
        ("rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": 1.0}}),
        ("partial_rotary_factor", 0.5),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}),
        ("rope_scaling", {"rope_type": "longrope", "factor": 8.0}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1.0}),
        ("rope_parameters", {"partial_rotary_factor": 0.25}),
    ],
)
def test_unsupported_is_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=name.removesuffix("s")) as caught:
        ModelConfig.from_directory(write(tmp_path, OLD, **{name: value}))
    assert "support" in caught.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", "absent"),
        ("vocab_size", True),
        ("hidden_size", 64.0),
        ("hidden_size", "64"),
        ("num_hidden_layers", -2),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", (1 << 31) - 1),
        ("num_hidden_layers", True),
        ("max_position_embeddings", True),
        ("intermediate_size", 10**30),
        ("hidden_size", float("nan")),
        ("num_attention_heads", 1 << 40),
        ("num_key_value_heads", 3),
        ("num_attention_heads", 128),  # makes head_dim 0
        ("head_dim", 15),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", True),
        ("rms_norm_eps", 10**400),  # no float holds it
        ("rope_theta", 10**400),
        ("rope_theta", 1e300),  # float32 does not
        ("rope_theta", -1),
        ("rope_scaling", [1]),
        ("rope_scaling", {"type": "linear", "factor": True}),
        ("sliding_window", True),
        ("tie_word_embeddings", 1),
        ("eos_token_id", 1000),
        ("eos_token_id", [2, True]),
        ("bos_token_id", "1"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_directory(write(tmp_path, OLD, **{name: value}))
    words = {"num_key_value_heads": "key/value heads"}
    expected = "head_dim" if value == 128 else words.get(name, name)
    assert expected in caught.value.message


def test_a_directory_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        ModelConfig.from_directory(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        ModelConfig.from_directory(tmp_path)
    file = tmp_path / "config.json"
    for content, words in (
        (b"{", "JSON"),
        (b"[]", "object"),
        (b"\xff", "JSON"),
        (b"[" * 99999, "JSON"),
    ):
        file.write_bytes(content)
        with pytest.raises(ModelError, match=words):
            ModelConfig.from_directory(tmp_path)
    with pytest.raises(ModelError, match="is a file"):
        ModelConfig.from_directory(file)


def test_kv_layout(tmp_path: Path) -> None:
    config = ModelConfig.from_directory(write(tmp_path, OLD))
    layout = config.kv_layout(16)
    assert layout.block_bytes == 2 * 2 * 2 * 16 * 16 * 4
    for size in (0, -16, 24, 128):
        with pytest.raises(ConfigError, match="block-size"):
            config.kv_layout(size)
    with pytest.raises(ConfigError, match="dtype"):
        config.kv_layout(16, "int8")


def test_weight_bytes(tmp_path: Path) -> None:
    config = ModelConfig.from_directory(write(tmp_path, OLD))
    layer = (64 + 32 + 32 + 64) * 64 + 3 * 64 * 128 + 2 * 64
    assert config.weight_bytes() == 4 * (2 * layer + 2 * 1000 * 64 + 64)


# --- families -----------------------------------------------------------------------------------

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def named(architecture: str, model_type: str) -> dict[str, Any]:
    return OLD | {"architectures": [architecture], "model_type": model_type}


def test_families(tmp_path: Path) -> None:
    qwen2 = ModelConfig.from_directory(write(tmp_path, named("Qwen2ForCausalLM", "qwen2")))
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, 16)
    qwen3 = ModelConfig.from_directory(write(tmp_path, named("Qwen3ForCausalLM", "qwen3")))
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    mistral = ModelConfig.from_directory(write(tmp_path, named("MistralForCausalLM", "mistral")))
    assert (mistral.qkv_bias, mistral.qk_norm) == (False, False)
    with pytest.raises(ModelError, match="model_type"):
        ModelConfig.from_directory(write(tmp_path, named("Qwen3ForCausalLM", "qwen2")))


SLIDES = {"sliding_window": 128, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("family", "settings", "window"),
    [
        (("MistralForCausalLM", "mistral"), {"sliding_window": 128}, 128),
        (("MistralForCausalLM", "mistral"), {"sliding_window": None}, None),
        (("MistralForCausalLM", "mistral"), {}, 4096),  # as the reference fills it in
        (("Qwen2ForCausalLM", "qwen2"), {"sliding_window": 128}, None),
        (("MistralForCausalLM", "mistral"), SLIDES | {"layer_types": ["full_attention"] * 2}, 128),
        (("Qwen2ForCausalLM", "qwen2"), SLIDES | {"max_window_layers": 1}, 128),
        (
            ("Qwen2ForCausalLM", "qwen2"),
            {"use_sliding_window": True, "max_window_layers": 1},
            4096,  # as the reference fills it in
        ),
        (("Qwen2ForCausalLM", "qwen2"), SLIDES | {"max_window_layers": 0}, 128),
        (("Qwen2ForCausalLM", "qwen2"), SLIDES | {"max_window_layers": 2}, None),
        (("Qwen2ForCausalLM", "qwen2"), SLIDES, None),  # 28 layers do not, and there are two
        (("Qwen3ForCausalLM", "qwen3"), SLIDES | {"layer_types": ["full_attention"] * 2}, None),
        (
            ("Qwen3ForCausalLM", "qwen3"),
            {"sliding_window": 128, "layer_types": ["full_attention", "sliding_attention"]},
            128,
        ),
    ],
)
def test_a_sliding_window_counts_where_a_layer_has_one(
    tmp_path: Path, family: tuple[str, str], settings: dict[str, Any], window: int | None
) -> None:
    config = ModelConfig.from_directory(write(tmp_path, named(*family) | settings))
    assert config.sliding_window == window


def test_scaled_rotary_positions_in_both_spellings(tmp_path: Path) -> None:
    old = ModelConfig.from_directory(write(tmp_path, OLD, rope_scaling=LLAMA3)).rope
    assert (old.kind, old.theta, old.factor, old.original_max_position) == ("llama3", 5000.0, 8, 64)
    new = {"rope_parameters": LLAMA3 | {"rope_theta": 5000.0}}
    write(tmp_path, OLD | new, rope_theta="absent", rope_scaling="absent")
    assert ModelConfig.from_directory(tmp_path).rope == old
    linear = ModelConfig.from_directory(
        write(tmp_path, OLD, rope_scaling={"type": "linear", "factor": 4})
    ).rope
    assert (linear.kind, linear.factor) == ("linear", 4.0)


@pytest.mark.parametrize("missing", sorted(LLAMA3.keys() - {"rope_type"}))
def test_an_incomplete_scaling_is_named(tmp_path: Path, missing: str) -> None:
    scaling = {key: value for key, value in LLAMA3.items() if key != missing}
    with pytest.raises(ModelError, match=missing):
        ModelConfig.from_directory(write(tmp_path, OLD, rope_scaling=scaling))


def test_scaling_factors_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    scaling = LLAMA3 | {"low_freq_factor": 4.0}
    with pytest.raises(ModelError, match="low_freq_factor below high_freq_factor"):
        ModelConfig.from_directory(write(tmp_path, OLD, rope_scaling=scaling))
