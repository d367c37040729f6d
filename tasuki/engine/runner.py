"""Runs one planned step on the model, samples, and tells how likely tokens were.

Knows nothing about queues, streams or handoffs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from tasuki.kv.cache import KVCache
from tasuki.messages import TokenLogprob
from tasuki.model.batch import Batch, BatchEntry
from tasuki.model.sampling.logprobs import token_logprobs
from tasuki.model.sampling.processors import Choice
from tasuki.model.sampling.sampler import Sampler
from tasuki.model.transformer import CausalLM
from tasuki.request import sample_key
from tasuki.scheduler.output import ModelRunnerOutput, ScheduledRequest, SchedulerOutput


class ModelRunner:
    """Writes KV into the blocks that a plan names, and nowhere else."""

    def __init__(self, model: CausalLM, cache: KVCache) -> None:
        self.model = model
        self.cache = cache
        self._sampler = Sampler()

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Compute every planned token; sample where the plan says so."""
        for copy in plan.copies:
            self.cache.copy_block(copy.source, copy.target)
        entries = [
            BatchEntry(
                token_ids=request.token_ids,
                start=request.num_computed_tokens,
                block_ids=request.block_ids,
                logits=request.num_logits,
            )
            for request in plan.requests
        ]
        batch = Batch.build(entries, self.cache.layout)
        logits = self.model.forward(batch, self.cache)
        last_rows: list[int] = []  # of the requests that sample
        choices: list[Choice] = []
        prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        row = 0
        for request in plan.requests:
            of_prompt = request.num_logits - request.samples
            if of_prompt:
                rows = logits[row : row + of_prompt]
                prompt_logprobs[request.key] = _prompt_logprobs(rows, request)
            row += request.num_logits
            if request.samples:
                last_rows += [row - 1] * request.num_choices
                choices += map(partial(_choice, request), range(request.num_choices))
        if last_rows != list(range(row)):
            logits = logits[last_rows]
        return self._sample(plan.step, logits, choices, prompt_logprobs)

    def _sample(
        self,
        step: int,
        logits: torch.Tensor,
        choices: Sequence[Choice],
        prompt_logprobs: dict[int, list[TokenLogprob]],
    ) -> ModelRunnerOutput:
        """`logits` has one row per choice."""
        token_ids = self._sampler.sample(logits, choices)
        rows, wanted, counts = [], [], []
        for row, choice in enumerate(choices):
            if choice.params.logprobs is not None:
                rows.append(row)
                wanted.append(choice.key)
                counts.append(choice.params.logprobs)
        logprobs = token_logprobs(logits[rows], [token_ids[row] for row in rows], counts)
        return ModelRunnerOutput(
            step,
            {choice.key: token_id for choice, token_id in zip(choices, token_ids, strict=True)},
            dict(zip(wanted, logprobs, strict=True)),
            prompt_logprobs,
        )


def _choice(request: ScheduledRequest, number: int) -> Choice:
    """What chooses the token of one of a request's samples."""
    return Choice(
        sample_key(request.key, number),
        request.sampling,
        request.prompt_token_ids,
        request.output_token_ids,
        request.eos_token_ids,
        request.sample_index + number,
    )


def _prompt_logprobs(rows: torch.Tensor, request: ScheduledRequest) -> list[TokenLogprob]:
    """Of the prompt tokens that follow the first wanted positions of a chunk, one per row."""
    count = request.sampling.prompt_logprobs
    assert count is not None, "only such a request wants more than its last logits"
    first = request.num_computed_tokens + len(request.token_ids) - request.num_logits
    token_ids = request.prompt_token_ids[first + 1 : first + 1 + rows.shape[0]]
    return token_logprobs(rows, token_ids, [count] * rows.shape[0])
