"""Their side: transformers' eager forward with its own growing cache and an argmax; no server.

The only file that imports transformers, which is a dependency of development alone.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from benchmarks.contender import Prefilled, Prompt


class TransformersModel:
    def __init__(self, model: Path, attention: str, dtype: torch.dtype = torch.float32) -> None:
        """`attention` is one of transformers' own implementations: `sdpa` or `eager`."""
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, attn_implementation=attention
        ).eval()
        self._cache: Any = None
        self._token = torch.empty(0, dtype=torch.long)
        self._said: list[torch.Tensor] = []

    @classmethod
    def quietly(
        cls, model: Path, attention: str, dtype: torch.dtype = torch.float32
    ) -> TransformersModel:
        """Without its progress bars and notices, which would stand in the middle of the table."""
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        # Version 5 renames the argument for the cache; 4.55, which is allowed too, has the old one.
        warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
        return cls(model, attention, dtype)

    def prefill(self, prompt: Prompt) -> Prefilled:
        begin = time.perf_counter()
        self._forward(torch.tensor([list(prompt)]), DynamicCache())
        return Prefilled(time.perf_counter() - begin, int(self._token[0, 0]))

    def start(self, prompts: Sequence[Prompt], tokens: int) -> None:
        self._cache = DynamicCache()
        self._said = [
            self._forward(torch.tensor([list(prompt) for prompt in prompts]), self._cache)
        ]

    def decode(self, steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            self._said.append(self._forward(self._token, self._cache))
        return (time.perf_counter() - begin) / steps

    def stop(self) -> list[list[int]]:
        said, self._said, self._cache = self._said, [], None
        tokens: list[list[int]] = torch.cat(said, dim=1).tolist()
        return tokens

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """[batch, positions] -> the next token of each, [batch, 1]; `cache` grows."""
        answer = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        self._token = answer.logits[:, -1].argmax(-1, keepdim=True)
        return self._token
