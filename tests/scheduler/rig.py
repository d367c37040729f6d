"""The scheduler against a runner that gives the same token to whoever asks. No torch, no time."""

from __future__ import annotations

from typing import Any

from tasuki.kv.layout import KVLayout
from tasuki.kv.manager import KVCacheManager
from tasuki.messages import SamplingParams
from tasuki.request import Request, sample_key
from tasuki.scheduler.config import SchedulerConfig
from tasuki.scheduler.output import ModelRunnerOutput, SchedulerOutput
from tasuki.scheduler.scheduler import Scheduler


def make(
    num_blocks: int = 64, *, block_size: int = 4, prefix_caching: bool = False, **config: Any
) -> Scheduler:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=block_size)
    blocks = KVCacheManager(layout, num_blocks, prefix_caching=prefix_caching)
    return Scheduler(SchedulerConfig(**config), blocks)


def request(key: int, prompt_len: int, max_tokens: int = 4, **fields: Any) -> Request:
    """A prompt that begins like every other one."""
    return Request(
        key=key,
        request_id=f"r{key}",
        prompt_token_ids=list(range(100, 100 + prompt_len)),
        sampling=SamplingParams(max_tokens=max_tokens),
        eos_token_ids=frozenset({2}),
        arrived=fields.pop("arrived", 0.0),
        **fields,
    )


def answer(plan: SchedulerOutput, token_id: int = 7) -> ModelRunnerOutput:
    """The same token for all that choose one; first tokens of samples count up from it."""
    chosen = {
        sample_key(entry.key, index): token_id + index
        for entry in plan.requests
        if entry.samples
        for index in range(entry.num_choices)
    }
    return ModelRunnerOutput(plan.step, chosen)


def step(scheduler: Scheduler, token_id: int = 7, now: float = 0.0) -> dict[int, int]:
    """One whole step; returns how many tokens were computed for each key."""
    plan = scheduler.schedule(now)
    check(scheduler, plan)
    scheduler.update(plan, answer(plan, token_id))
    scheduler.check_integrity()
    return {entry.key: len(entry.token_ids) for entry in plan.requests}


def check(scheduler: Scheduler, plan: SchedulerOutput) -> None:
    """What holds for every plan: budgets, and allocation before dispatch."""
    assert plan.num_tokens <= scheduler.config.max_num_batched_tokens
    assert len(plan.requests) <= scheduler.config.max_num_seqs
    assert len({entry.key for entry in plan.requests}) == len(plan.requests)
    for entry in plan.requests:
        assert entry.token_ids
        end = entry.num_computed_tokens + len(entry.token_ids)
        assert len(entry.block_ids) * scheduler.blocks.layout.block_size >= end
        assert list(entry.block_ids) == list(scheduler.blocks.table(entry.key))


def drain(scheduler: Scheduler, limit: int = 1000) -> int:
    """Step until nothing is left; returns how many steps computed something."""
    steps = 0
    for _ in range(limit):
        if not scheduler.has_work:
            return steps
        steps += bool(step(scheduler))
    raise AssertionError("requests do not end")


def hand_over(scheduler: Scheduler, one: Request, first_token: int = 9) -> bool:
    """A committed handoff: the prompt's KV is here, and the first token known. False: no room."""
    blocks = scheduler.blocks
    if not scheduler.reserve(one, blocks.match(one)):
        return False
    blocks.commit(one.key)
    one.num_computed_tokens = one.prompt_len
    one.append(first_token, scheduler.config.max_model_len)
    blocks.publish(one)
    scheduler.adopt(one)
    return True
