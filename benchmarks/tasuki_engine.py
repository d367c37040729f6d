"""Our side: the product's Engine in this process, with its scheduler, paged cache and sampler."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.contender import Prefilled, Prompt
from tasuki.clock import monotonic
from tasuki.config import WorkerConfig
from tasuki.engine.engine import Engine
from tasuki.kv.manager import KVCacheManager
from tasuki.messages import SamplingParams
from tasuki.request import Request
from tasuki.scheduler.scheduler import Scheduler

KV_BLOCKS = 1280  # 64 requests of 300 positions, with room


class TasukiEngine:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._key = 0
        self._running: list[Request] = []

    @classmethod
    def load(
        cls, model: Path, chunk: int, *, dtype: str = "float32", threads: int = 1
    ) -> TasukiEngine:
        """Raises ModelError. `chunk` is the token budget of a step. Nothing is found in a cache."""
        config = WorkerConfig(
            model=str(model),
            kv_blocks=KV_BLOCKS,
            max_num_batched_tokens=chunk,
            dtype=dtype,
            threads=threads,
            prefix_caching=False,
        )
        return cls(Engine.load(config))

    def with_chunk(self, chunk: int) -> TasukiEngine:
        """The same weights and cache under another budget; only one of the two may have work."""
        engine = self._engine
        limits = replace(engine.scheduler.config, max_num_batched_tokens=chunk)
        scheduler = Scheduler(limits, KVCacheManager(engine.cache.layout, KV_BLOCKS))
        return TasukiEngine(Engine(engine.model, engine.cache, scheduler, engine.identity))

    def prefill(self, prompt: Prompt) -> Prefilled:
        begin = time.perf_counter()
        request = self._add(prompt, max_tokens=1)
        while self._engine.has_work:
            self._engine.step()
        return Prefilled(time.perf_counter() - begin, request.output_token_ids[0])

    def start(self, prompts: Sequence[Prompt], tokens: int) -> None:
        # the first prompts decode while the last ones are computed: a few tokens more for them
        self._running = [self._add(prompt, tokens + 2 * len(prompts)) for prompt in prompts]
        while not all(r.output_token_ids and r.remaining_tokens == 1 for r in self._running):
            self._engine.step()

    def decode(self, steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            updates = self._engine.step()
            assert len(updates) == len(self._running), "a step gives every request a token"
        return (time.perf_counter() - begin) / steps

    def stop(self) -> list[list[int]]:
        for request in self._running:
            self._engine.cancel(request)
        self._engine.check_integrity()
        assert not self._engine.has_work
        requests, self._running = self._running, []
        return [request.output_token_ids for request in requests]

    def _add(self, prompt: Prompt, max_tokens: int) -> Request:
        self._key += 1
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(
            self._key, f"bench-{self._key}", list(prompt), sampling, frozenset(), monotonic()
        )
        self._engine.add(request)
        return request
