"""The engine: one model, one KV cache, one scheduler; the same for both roles, usable in process.

    engine = Engine.load(WorkerConfig(model="path/to/model"))
    engine.add(request)
    while engine.has_work:
        for update in engine.step():
            print(update.request.request_id, update.token_ids)

Knows nothing about streams, handoffs or other processes. `step` is `schedule`, `execute`, `update`;
a worker calls the three itself, and holds its lock for the first and the last only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from tasuki.cache_root import cache_root
from tasuki.clock import Clock, monotonic
from tasuki.config import WorkerConfig, parse_size
from tasuki.convert.resolve import resolve_model
from tasuki.engine import token_budget
from tasuki.engine.connectors import link_memory
from tasuki.engine.memory import (
    available_memory,
    choose_num_blocks,
    give_back_memory,
    require_memory,
    resident_memory,
)
from tasuki.engine.runner import ModelRunner
from tasuki.errors import ConfigError, InvalidRequestError, ModelError
from tasuki.kv.cache import KVCache
from tasuki.kv.manager import KVCacheManager
from tasuki.messages import FinishReason, LayoutDescription, SamplingParams
from tasuki.messages.sampling import require_answerable, require_valid, require_vocabulary
from tasuki.model import exactness
from tasuki.model.config import ModelConfig
from tasuki.model.device import open_device
from tasuki.model.transformer import CausalLM
from tasuki.model.weights import weights_digest
from tasuki.native import library
from tasuki.request import Request
from tasuki.scheduler.config import (
    Admission,
    Batching,
    QueueOrder,
    SchedulerConfig,
    StepOrder,
)
from tasuki.scheduler.output import ModelRunnerOutput, RequestUpdate, SchedulerOutput
from tasuki.scheduler.scheduler import Scheduler

SPEED_MEMORY = 0.8  # weight of the past in the running mean of measured speed


class Engine:
    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        scheduler: Scheduler,
        identity: LayoutDescription,
        clock: Clock = monotonic,
        *,
        measures_budget: bool = False,
    ) -> None:
        """With `measures_budget`, `warm_up` replaces the scheduler's token budget."""
        self.model = model
        self.cache = cache
        self.scheduler = scheduler
        self.blocks = scheduler.blocks
        self.identity = identity
        self.runner = ModelRunner(model, cache)
        self.clock = clock
        self.prefill_tokens_per_second = 0.0
        self.exact: bool | None = None  # whether a row's bits are its own business; see warm_up
        self.overhead = 0  # bytes resident beside weights and KV cache; see warm_up
        self._measures_budget = measures_budget

    @classmethod
    def load(cls, config: WorkerConfig, *, allocate_whole_prompt: bool = False) -> Engine:
        """Load a model directory. Raises ModelError or ConfigError, before any heavy work if it
        can.
        """
        directory = resolve_model(config.model)
        model_config = ModelConfig.from_directory(directory)
        max_model_len = config.max_model_len or model_config.max_position
        if not 1 < max_model_len <= model_config.max_position:
            raise ConfigError(
                f"--max-model-len is {max_model_len}; expected 2 to {model_config.max_position}, "
                "the positions this model was trained for"
            )
        torch.set_num_threads(config.threads)
        device = open_device(config.device)
        window = model_config.sliding_window
        if window is not None and max_model_len > window:
            raise ModelError(
                f"{directory} has a sliding_window of {window} positions, shorter than the context "
                f"of {max_model_len}, which is not supported; start with --max-model-len {window}"
            )
        on_cpu = device.type == "cpu"
        native = on_cpu and config.native and library.load(cache_root(os.environ))
        layout = model_config.kv_layout(config.block_size, config.dtype, keys_transposed=native)
        link_bytes = link_memory(config, layout.block_bytes)
        num_blocks = choose_num_blocks(
            layout,
            max_model_len,
            config.kv_blocks,
            parse_size("--kv-cache-memory", config.kv_cache_memory),
            link_bytes,
        )
        weight_bytes = model_config.weight_bytes(config.dtype)
        require_memory(weight_bytes, layout, num_blocks, available_memory(device), link_bytes)
        model = CausalLM.load(
            directory, dtype=config.dtype, native=native, positions=max_model_len, device=device
        )
        give_back_memory()
        identity = layout.describe(
            model_id=model_config.model_id,
            weights_digest=weights_digest(directory),
            numerics=model.numerics(),
        )
        limits = SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens or token_budget.MOST,
            max_model_len=max_model_len,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            step_order=StepOrder(config.step_order),
            admission=Admission(config.admission),
            batching=Batching(config.batching),
            batch_window=config.batch_window,
            queue_order=QueueOrder(config.queue_order),
            priority_ageing=config.priority_ageing,
            max_bypasses=config.max_bypasses,
            allocate_whole_prompt=allocate_whole_prompt,
        )
        blocks = KVCacheManager(layout, num_blocks, prefix_caching=config.prefix_caching)
        scheduler = Scheduler(limits, blocks)
        return cls(
            model,
            KVCache(layout, num_blocks, str(device)),
            scheduler,
            identity,
            measures_budget=not config.max_num_batched_tokens,
        )

    # --- requests -----------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        return self.scheduler.config.max_model_len

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def validate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        output_token_ids: Sequence[int] = (),
    ) -> None:
        """Raise InvalidRequestError for what could never be computed here."""
        if not prompt_token_ids:
            raise InvalidRequestError("the prompt is empty; expected at least one token")
        vocab_size = self.model.config.vocab_size
        known = (*prompt_token_ids, *output_token_ids)
        if not 0 <= min(known) <= max(known) < vocab_size:
            raise InvalidRequestError(f"token ids must lie between 0 and {vocab_size - 1}")
        require_valid(sampling)
        require_vocabulary(sampling, vocab_size)
        require_answerable(sampling, len(prompt_token_ids))
        if sampling.max_tokens <= len(output_token_ids):
            raise InvalidRequestError(
                f"max_tokens is {sampling.max_tokens} and {len(output_token_ids)} tokens are "
                "there already; expected at least one to generate"
            )
        if sampling.n > 1 and output_token_ids:
            raise InvalidRequestError(
                f"n is {sampling.n} and output tokens are there already; expected n = 1: samples "
                "go on one by one"
            )
        self.scheduler.require_possible(
            len(prompt_token_ids), len(output_token_ids), sampling.max_tokens
        )

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError."""
        self.validate(request.prompt_token_ids, request.sampling, request.output_token_ids)
        self.scheduler.add(request, self.clock())

    def cancel(self, request: Request, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self.scheduler.cancel(request, reason)

    # --- steps --------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        return self.scheduler.schedule(self.clock())

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run the forward; nothing of the scheduler is touched meanwhile."""
        return self.runner.execute(plan) if plan.requests else ModelRunnerOutput(plan.step)

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestUpdate]:
        return self.scheduler.update(plan, result)

    def step(self) -> list[RequestUpdate]:
        """One whole step, for use in process."""
        plan = self.schedule()
        return self.update(plan, self.execute(plan))

    def measure(self, plan: SchedulerOutput, seconds: float) -> None:
        """Learn the speed of prompt computation from a step that was mostly that."""
        chunk = sum(len(r.token_ids) for r in plan.requests if len(r.token_ids) > 1)
        if 2 * chunk < self.scheduler.config.max_num_batched_tokens or seconds <= 0:
            return
        speed, past = chunk / seconds, self.prefill_tokens_per_second
        self.prefill_tokens_per_second = (
            speed if not past else SPEED_MEMORY * past + (1 - SPEED_MEMORY) * speed
        )

    def warm_up(self) -> None:
        """Try whether computing is exact here, find the token budget if none was given, and run a
        full chunk and a few decode steps, so that no request meets a cold path. Leaves the cache as
        if nothing had happened.
        """
        self.exact = exactness.holds(self.model, self.cache.layout)
        if self._measures_budget:
            budget = token_budget.choose(self._time_worst_step)
            self.scheduler.set_token_budget(budget)
        limits = self.scheduler.config
        room = min(self.max_model_len, self.blocks.pool.num_blocks * self.cache.layout.block_size)
        length = max(1, min(limits.max_num_batched_tokens, room - 4))
        for key in (-1, -2):
            sampling = SamplingParams(max_tokens=4, ignore_eos=True)
            request = Request(key, "warm-up", [0] * length, sampling, frozenset(), self.clock())
            request.skips_prefix_cache = True
            self.add(request)
            while self.has_work:
                plan = self.schedule()
                begin = time.perf_counter()
                result = self.execute(plan)
                self.measure(plan, time.perf_counter() - begin)
                self.update(plan, result)
        self.blocks.reset_prefix_cache()
        self.cache.clear()  # all of it is resident from now on: no step waits for memory
        give_back_memory()
        held = self.model.config.weight_bytes(self.model.dtype) + self.cache.nbytes
        self.overhead = resident_memory(self.model.device) - held

    def _time_worst_step(self, num_tokens: int) -> float:
        layout, pool = self.cache.layout, self.blocks.pool
        plan = token_budget.worst_step(num_tokens, self.scheduler.config, layout, pool.num_blocks)
        return token_budget.timed(lambda: self.execute(plan))

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
