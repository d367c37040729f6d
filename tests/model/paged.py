"""Drives a CausalLM as a scheduler would: paged, chunked, batched."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from tasuki.kv.cache import KVCache
from tasuki.model.batch import Batch, BatchEntry
from tasuki.model.transformer import CausalLM


@dataclass
class Run:
    """One request: its tokens so far, how many have KV, and the logits it was given."""

    tokens: list[int]
    block_ids: list[int]
    prompt_len: int
    computed: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class Paged:
    """A model with a cache whose blocks are handed out in random order and never taken back."""

    def __init__(self, model: CausalLM, num_blocks: int = 600, block_size: int = 16) -> None:
        self.model = model
        self.layout = model.layout(block_size)
        self.cache = KVCache(self.layout, num_blocks, str(model.device))
        leftovers = torch.empty(self.cache.tensor.shape, dtype=self.cache.tensor.dtype)
        self.cache.tensor.copy_(leftovers.normal_(generator=torch.Generator().manual_seed(3)))
        self._free = list(range(num_blocks))
        random.Random(5).shuffle(self._free)

    def start(self, prompt: Sequence[int], room: int) -> Run:
        """A request with blocks for its prompt and `room` more tokens."""
        count = self.layout.blocks_for(len(prompt) + room)
        return Run(list(prompt), [self._free.pop() for _ in range(count)], len(prompt))

    def step(self, parts: Sequence[tuple[Run, int]]) -> None:
        """Compute the given number of each run's next tokens; keep logits where it catches up."""
        entries = [
            BatchEntry(
                token_ids=run.tokens[run.computed : run.computed + count],
                start=run.computed,
                block_ids=run.block_ids,
                logits=int(run.computed + count == len(run.tokens)),
            )
            for run, count in parts
        ]
        rows = iter(self.model.forward(Batch.build(entries, self.layout), self.cache))
        for entry, (run, count) in zip(entries, parts, strict=True):
            run.computed += count
            if entry.logits:
                run.logits.append(next(rows).clone())

    def prefill(self, run: Run, sizes: Iterator[int]) -> None:
        """Compute all known tokens in chunks of these sizes."""
        while run.computed < len(run.tokens):
            self.step([(run, min(next(sizes), len(run.tokens) - run.computed))])

    def follow(self, runs: Sequence[Run], given: Sequence[Sequence[int]]) -> None:
        """Compute the prompts, then decode the given tokens, all runs together: whatever comes out
        is not fed back. Every stream is given as many tokens.
        """
        for run in runs:
            self.prefill(run, itertools.repeat(100))
        for tokens in zip(*given, strict=True):
            for run, token in zip(runs, tokens, strict=True):
                run.tokens.append(token)
            self.step([(run, 1) for run in runs])

    def generate(self, runs: Sequence[Run], count: int, budget: int = 256) -> None:
        """Continue all runs greedily by `count` tokens: decodes first, the rest of the budget to
        prompts.
        """
        while waiting := [run for run in runs if len(run.logits) < count]:
            left, parts = budget, []
            for run in sorted(waiting, key=lambda run: len(run.tokens) - run.computed):
                share = min(left, len(run.tokens) - run.computed)
                if share:
                    parts.append((run, share))
                    left -= share
            self.step(parts)
            for run, _ in parts:
                if run.computed == len(run.tokens):
                    run.tokens.append(int(run.logits[-1].argmax()))
