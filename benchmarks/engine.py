"""The engine against transformers on the demo model, one thread, in one run.

Ours is the product's Engine: scheduler, paged cache, sampling. Theirs is a forward with its own
dynamic cache and an argmax, without a server either. Each round runs both.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.machine import gemm_speed, read_speed
from benchmarks.rounds import Spread, interleave, ratios
from benchmarks.table import markdown
from tasuki.config import WorkerConfig
from tasuki.convert.cache import cache_root
from tasuki.convert.demo import ensure_demo
from tasuki.engine.engine import Engine
from tasuki.messages import SamplingParams
from tasuki.request import Request

CONTEXT = 224
PREFILL = 512
STEPS = 8  # decode steps per round
ROUNDS = 7


@dataclass(frozen=True)
class EngineResult:
    name: str
    ours: Spread  # milliseconds
    theirs: Spread
    ratio: Spread


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, 40000, (length,), generator=generator).tolist()


class Ours:
    def __init__(self, model: Path, chunk: int) -> None:
        config = WorkerConfig(model=str(model), kv_blocks=600, max_num_batched_tokens=chunk)
        self._engine = Engine.load(config)
        self._key = 0

    def _add(self, length: int, max_tokens: int) -> None:
        self._key += 1
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        now = time.monotonic()
        tokens = prompt(length, self._key)
        self._engine.add(Request(self._key, "bench", tokens, sampling, frozenset(), now))

    def _drain(self) -> None:
        while self._engine.has_work:
            self._engine.step()

    def prefill(self) -> float:
        """Seconds from an idle engine to the first token."""
        self._add(PREFILL, 1)
        begin = time.perf_counter()
        self._drain()
        return time.perf_counter() - begin

    def decode(self, batch: int) -> float:
        """Seconds per step with `batch` running requests."""
        for _ in range(batch):
            self._add(CONTEXT, STEPS + 2)
        scheduler = self._engine.scheduler
        while any(r.remaining_tokens > 1 for r in (*scheduler.running, *scheduler.waiting)):
            self._engine.step()
        self._engine.step()
        begin = time.perf_counter()
        for _ in range(STEPS):
            if not self._engine.has_work:
                break
            self._engine.step()
        seconds = time.perf_counter() - begin
        self._drain()
        return seconds / STEPS


class Theirs:
    def __init__(self, model: Path, attention: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation=attention
        ).eval()

    @torch.inference_mode()
    def prefill(self) -> float:
        ids = torch.tensor([prompt(PREFILL, 1)])
        begin = time.perf_counter()
        self._model(ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)
        return time.perf_counter() - begin

    @torch.inference_mode()
    def decode(self, batch: int) -> float:
        ids = torch.tensor([prompt(CONTEXT, n) for n in range(batch)])
        out = self._model(ids, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        begin = time.perf_counter()
        for _ in range(STEPS):
            out = self._model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
        return (time.perf_counter() - begin) / STEPS


def measure(rounds: int = ROUNDS) -> list[EngineResult]:
    """Raises ModelError when the demo model cannot be had."""
    logging.disable_progress_bar()
    model = ensure_demo(cache_root(os.environ))
    torch.set_num_threads(1)
    ours = Ours(model, chunk=256)
    theirs = {name: Theirs(model, name) for name in ("sdpa", "eager")}
    cases: dict[str, tuple[Callable[[], float], dict[str, Callable[[], float]]]] = {
        f"prefill {PREFILL}": (ours.prefill, {n: t.prefill for n, t in theirs.items()}),
        **{
            f"decode, batch {batch}": (
                partial(ours.decode, batch),
                {n: partial(t.decode, batch) for n, t in theirs.items()},
            )
            for batch in (1, 8)
        },
    }
    return [_measure_case(name, mine, peers, rounds) for name, (mine, peers) in cases.items()]


def _measure_case(
    name: str, mine: Callable[[], float], peers: dict[str, Callable[[], float]], rounds: int
) -> EngineResult:
    times = interleave({"ours": mine, **peers}, rounds)
    best = min(peers, key=lambda peer: Spread.of(times[peer]).median)  # the faster of theirs
    return EngineResult(
        f"{name} (transformers: {best})",
        Spread.of([1000 * seconds for seconds in times["ours"]]),
        Spread.of([1000 * seconds for seconds in times[best]]),
        Spread.of(ratios(times[best], times["ours"])),
    )


def report(results: list[EngineResult], rounds: int = ROUNDS) -> str:
    rows = [
        [
            result.name,
            f"{result.ours.median:.1f}",
            f"{result.theirs.median:.1f}",
            f"{result.ratio.median:.2f} ({result.ratio.low:.2f} to {result.ratio.high:.2f})",
        ]
        for result in results
    ]
    header = ["demo model, float32, one thread", "ours, ms", "theirs, ms", "ratio, median (range)"]
    limits = (
        f"Limits of this machine, one thread: memory read {read_speed() / 1e9:.1f} GB/s, prepacked "
        f"float32 matrix product {gemm_speed() / 1e9:.0f} GFLOP/s; {rounds} rounds."
    )
    return f"### Engine\n\n{markdown(header, rows)}\n\n{limits}"
