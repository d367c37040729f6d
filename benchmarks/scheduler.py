"""CPU time to plan a step and to take its result, by the number of running requests.

No model and no clock of its own: the scheduler is called as an engine calls it, with the prefix
cache on and 50 requests waiting. Two kinds of step, both planned from the same state:
* steady: every running request gets its next token, one in 16 a fresh block;
* preempting: every one needs a fresh block at once, and 5 % must give way.
A few steps are taken before the one that counts.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass

from benchmarks.table import markdown
from tasuki.kv.layout import KVLayout
from tasuki.kv.manager import KVCacheManager
from tasuki.messages import SamplingParams
from tasuki.request import Request
from tasuki.scheduler.config import SchedulerConfig
from tasuki.scheduler.output import ModelRunnerOutput, SchedulerOutput
from tasuki.scheduler.scheduler import Scheduler

SIZES = (250, 500, 1000, 2000)
WAITING = 50
BLOCK_SIZE = 16
BLOCKS_EACH = 16
GIVE_WAY = 0.05
WARM_STEPS = 4
ROUNDS = 15


@dataclass(frozen=True)
class Row:
    """Milliseconds of CPU, medians."""

    running: int
    steady_schedule: float
    steady_update: float
    preempting_schedule: float
    preempting_update: float
    preempted: int


@dataclass(frozen=True)
class Result:
    rows: list[Row]


def make(running: int, *, preempting: bool) -> Scheduler:
    """A scheduler whose running requests hold whole blocks (preempting) or are spread over one."""
    survivors = running - round(running * GIVE_WAY)
    spare = survivors - (running - survivors) * BLOCKS_EACH if preempting else 2 * running
    layout = KVLayout(1, 1, 1, BLOCK_SIZE)
    blocks = KVCacheManager(layout, running * BLOCKS_EACH + max(0, spare))
    config = SchedulerConfig(
        max_num_seqs=running, max_num_batched_tokens=4 * running, max_model_len=4096
    )
    scheduler = Scheduler(config, blocks)
    for key in range(running + WAITING):
        length = BLOCKS_EACH * BLOCK_SIZE - WARM_STEPS - (0 if preempting else key % BLOCK_SIZE)
        sampling = SamplingParams(max_tokens=1000, ignore_eos=True)
        prompt = [(key * 31 + position) % 50_000 for position in range(length)]
        request = Request(key, f"r{key}", prompt, sampling, frozenset(), 0.0)
        if key >= running:
            scheduler.add(request, 0.0)
            continue
        if not blocks.begin(request, blocks.match(request), length):
            raise AssertionError("the pool is sized for all of them")
        request.num_computed_tokens = length
        request.append(7, config.max_model_len)
        blocks.publish(request)
        scheduler.adopt(request)
    return scheduler


def one_step(running: int, *, preempting: bool) -> tuple[float, float, int]:
    scheduler = make(running, preempting=preempting)
    for _ in range(WARM_STEPS):
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, sampled(plan))
    gc.collect()
    gc.disable()
    try:
        begin = time.process_time()
        plan = scheduler.schedule(0.0)
        planned = time.process_time()
        result = sampled(plan)
        executed = time.process_time()
        scheduler.update(plan, result)
        return planned - begin, time.process_time() - executed, scheduler.preemptions
    finally:
        gc.enable()


def sampled(plan: SchedulerOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput(plan.step, {r.key: 9 for r in plan.requests if r.samples})


def milliseconds(steps: list[tuple[float, float, int]], column: int) -> float:
    return statistics.median(step[column] for step in steps) * 1000


def measure(rounds: int = ROUNDS) -> Result:
    rows = []
    for running in SIZES:
        steady = [one_step(running, preempting=False) for _ in range(rounds)]
        hard = [one_step(running, preempting=True) for _ in range(rounds)]
        rows.append(
            Row(
                running=running,
                steady_schedule=milliseconds(steady, 0),
                steady_update=milliseconds(steady, 1),
                preempting_schedule=milliseconds(hard, 0),
                preempting_update=milliseconds(hard, 1),
                preempted=hard[0][2],
            )
        )
    return Result(rows)


def report(result: Result) -> str:
    header = [
        "running (and 50 waiting)",
        "steady: schedule, ms",
        "update, ms",
        "preempting: schedule, ms",
        "update, ms",
        "gave way",
    ]
    lines = [
        [
            str(row.running),
            f"{row.steady_schedule:.2f}",
            f"{row.steady_update:.2f}",
            f"{row.preempting_schedule:.2f}",
            f"{row.preempting_update:.2f}",
            str(row.preempted),
        ]
        for row in result.rows
    ]
    return f"### Scheduler\n\n{markdown(header, lines)}\n\nCPU time of one step, prefix cache on."
