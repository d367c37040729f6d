"""What transformers computes for random models: the streams and logits that ours must equal."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

PROMPT_LENGTHS = (1, 15, 16, 17, 64, 100, 300, 700)
NEW_TOKENS = 64


@dataclass(frozen=True)
class Case:
    """One model. `shards`: written as several weight files behind an index."""

    name: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool
    shards: bool = False
    config: type[PreTrainedConfig] = LlamaConfig
    more: Mapping[str, Any] = field(default_factory=dict)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,  # most prompts are longer
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
CASES = (
    Case("mqa_tied", 160, 4, 1, 24, tied=True),
    Case("gqa_wide_heads_untied", 192, 8, 2, 32, tied=False, shards=True),
    Case("mha_narrow_heads_untied", 160, 4, 4, 20, tied=False),
    Case("llama3_rope", 128, 4, 2, 32, tied=True, more={"rope_parameters": LLAMA3}),
    Case("linear_rope", 160, 4, 2, 32, tied=False, more={"rope_parameters": LINEAR}),
    Case("qwen2", 192, 4, 2, 40, tied=False, config=Qwen2Config),
    Case("qwen3", 128, 4, 2, 48, tied=False, config=Qwen3Config),
    Case("mistral", 192, 4, 1, 32, tied=False, config=MistralConfig, more={"sliding_window": None}),
)


@dataclass(frozen=True)
class Stream:
    """One prompt, its greedy continuation, and the logits each token was chosen from."""

    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor  # [NEW_TOKENS, vocab_size]

    def gap(self, index: int) -> float:
        """How far the best logit at one place is ahead of the next."""
        best, second = self.logits[index].topk(2).values.tolist()
        return float(best - second)


@dataclass(frozen=True)
class Reference:
    case: Case
    directory: Path
    model: Any
    streams: list[Stream]


def make_reference(case: Case, directory: Path, vocab_size: int = 800) -> Reference:
    """Make the model, write it, and let transformers continue prompts of every length."""
    torch.manual_seed(0)
    config = case.config(
        vocab_size=vocab_size,
        hidden_size=case.hidden_size,
        intermediate_size=200,
        num_hidden_layers=3,
        num_attention_heads=case.num_heads,
        num_key_value_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        max_position_embeddings=1024,
        initializer_range=0.1,
        tie_word_embeddings=case.tied,
        attn_implementation="eager",
        **case.more,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomise(model)
    model.save_pretrained(directory, max_shard_size="400KB" if case.shards else "1GB")
    generator = torch.Generator().manual_seed(11)
    prompts = [
        torch.randint(0, vocab_size, (length,), generator=generator).tolist()
        for length in PROMPT_LENGTHS
    ]
    return Reference(case, directory, model, [greedy(model, p, NEW_TOKENS) for p in prompts])


@torch.no_grad()
def randomise(model: Any) -> None:
    """What starts as zeros or ones would hide a mistake: biases, and norms of q and k."""
    for name, parameter in model.named_parameters():
        if name.endswith("proj.bias"):
            parameter.normal_(std=0.3)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.add_(torch.randn_like(parameter), alpha=0.3)


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], count: int) -> Stream:
    """Continue `prompt` by `count` tokens, one forward each."""
    warnings.filterwarnings("ignore", message="`past_key_values`")  # older ones know no other name
    tokens: list[int] = []
    rows: list[torch.Tensor] = []
    past, fed = None, torch.tensor([prompt])
    for _ in range(count):
        result = model(input_ids=fed, past_key_values=past, use_cache=True, logits_to_keep=1)
        past = result.past_key_values
        rows.append(result.logits[0, -1].clone())
        tokens.append(int(rows[-1].argmax()))
        fed = torch.tensor([[tokens[-1]]])
    return Stream(prompt, tokens, torch.stack(rows))
