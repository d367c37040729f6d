"""Runs one planned step on the model and samples. Knows nothing about queues, streams or
handoffs.
"""

from __future__ import annotations

import torch

from tasuki.kv.cache import KVCache
from tasuki.model.batch import Batch, BatchEntry
from tasuki.model.sampler import sample
from tasuki.model.transformer import CausalLM
from tasuki.scheduler.output import ModelRunnerOutput, SchedulerOutput


class ModelRunner:
    """Writes KV into the blocks that a plan names, and nowhere else."""

    def __init__(self, model: CausalLM, cache: KVCache) -> None:
        self.model = model
        self.cache = cache

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
                sample=request.samples,
            )
            for request in plan.requests
        ]
        batch = Batch.build(entries, self.cache.layout)
        logits = self.model.forward(batch, self.cache)
        sampling = [request for request in plan.requests if request.samples]
        if not sampling:
            return ModelRunnerOutput(plan.step)
        # the sampled token's own position decides its noise: the same on any worker, in any batch
        positions = [r.num_computed_tokens + len(r.token_ids) for r in sampling]
        token_ids = sample(logits, [r.sampling for r in sampling], positions)
        return ModelRunnerOutput(
            plan.step, {r.key: token for r, token in zip(sampling, token_ids, strict=True)}
        )
