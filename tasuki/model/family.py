"""Which families of models are computed, and what each does differently. Pure facts.

All of them are Llama-shaped: RMSNorm before attention and before a gated MLP, grouped-query
attention, rotary positions. A family is known by the one architecture its config.json names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    name: str  # for messages
    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False  # every head of q and k is normalised before it is rotated
    head_dim: int | None = None  # where config.json names none; None: hidden / heads
    window: int | None = None  # where config.json does not even mention `sliding_window`
    sliding_by_flag: bool = False  # `sliding_window` counts only with `use_sliding_window`


FAMILIES = {
    "LlamaForCausalLM": Family("Llama", "llama"),
    "MistralForCausalLM": Family("Mistral", "mistral", window=4096),
    "Qwen2ForCausalLM": Family("Qwen2", "qwen2", qkv_bias=True, window=4096, sliding_by_flag=True),
    "Qwen3ForCausalLM": Family(
        "Qwen3", "qwen3", qk_norm=True, head_dim=128, window=4096, sliding_by_flag=True
    ),
}

# Settings that change the arithmetic, and the values that leave it as it is implemented here.
ONLY: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "hidden_act": ("silu", "swish", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_qk_norm": (False, None),
    "is_encoder_decoder": (False, None),
    "num_local_experts": (None,),
    "use_mrope": (False, None),
}
