"""Every sampling parameter through real processes: the same in split, colocated and fallback."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cli.cluster.cluster_spec import ClusterSpec
from cli.cluster.local_cluster import LocalCluster
from tasuki.client import Client
from tasuki.messages import FinishReason, Role
from tests.integration.faults import CRAWL, SLOWABLE, inject
from tests.integration.scrape import assert_no_leaks, scrape_until
from tests.integration.streams import DEATHS, Answer, ask, ask_samples, prompt

pytestmark = [pytest.mark.dist, pytest.mark.asyncio(loop_scope="session")]

PROMPT = prompt(1000, seed=4)
CASES: dict[str, dict[str, Any]] = {
    "top-k": {"temperature": 0.9, "seed": 1, "top_k": 20},
    "top-p and min-p": {"temperature": 1.2, "seed": 2, "top_p": 0.7, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "bias": {"logit_bias": {70: 2.5, 71: -100.0}, "temperature": 0.5, "seed": 3},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1, "temperature": 0.7, "seed": 4},
    "stop ids": {"stop_token_ids": list(range(33, 64)), "min_tokens": 9, "seed": 5},
    "stop text": {
        "temperature": 1.0,
        "seed": 6,
        "stop": ["a", "e", "i", "o", "u"],
        "min_tokens": 5,
    },
}


def told(answer: Answer) -> list[Any]:
    """All that must not depend on where it was computed."""
    return [
        answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason, answer.logprobs,
        answer.prompt_logprobs, answer.usage.completion_tokens,
    ]  # fmt: skip


async def answers(cluster: LocalCluster, *, together: bool) -> list[Answer]:
    """Together some are local, because the prefill worker is busy."""
    async with Client(cluster.router_address) as client:
        calls = [ask(client, PROMPT, **case) for case in CASES.values()]
        if together:
            return list(await asyncio.gather(*calls))
        return [await call for call in calls]


@pytest_asyncio.fixture(loop_scope="session")
async def expected(colocated: LocalCluster) -> dict[str, Answer]:
    return dict(zip(CASES, await answers(colocated, together=False), strict=True))


async def test_each_case_does_what_it_says(
    colocated: LocalCluster, expected: dict[str, Answer]
) -> None:
    async with Client(colocated.router_address) as client:
        plain = await ask(client, PROMPT)
    assert all(answer.token_ids != plain.token_ids for answer in expected.values())
    logprobs = expected["logprobs"]
    assert [one.token_id for one in logprobs.logprobs] == logprobs.token_ids
    assert [one.token_id for one in logprobs.prompt_logprobs] == PROMPT[1:]
    assert all(len(one.top_logprobs) == 2 for one in logprobs.logprobs)
    assert 71 not in expected["bias"].token_ids
    by_id, by_text = expected["stop ids"], expected["stop text"]
    for answer in (by_id, by_text):
        assert answer.finish_reason is FinishReason.STOP
        assert answer.usage.completion_tokens == len(answer.token_ids) < 64
    assert by_id.stop_reason == by_id.token_ids[-1] in range(33, 64)
    assert len(by_id.token_ids) > 9
    assert by_text.stop_reason in CASES["stop text"]["stop"]
    assert len(by_text.token_ids) > 5


async def test_split_is_as_colocated(split: LocalCluster, expected: dict[str, Answer]) -> None:
    for together in (False, True):
        got = await answers(split, together=together)
        for (case, wanted), answer in zip(expected.items(), got, strict=True):
            assert told(answer) == told(wanted), case
            if not together:
                assert answer.placement.kind == "split", case
                assert answer.placement.fallback_reason == "", case
                assert answer.placement.decode_computed_prompt_tokens == 0, case


async def test_fallback_is_as_colocated(tiny_model: Path, expected: dict[str, Answer]) -> None:
    """The prefill worker dies amid the transfer of some, and while it computes others."""
    steps = {"prefill-0": {"max_num_batched_tokens": 1}}  # 7,000 of them
    spec = ClusterSpec(model=tiny_model, worker=SLOWABLE, overrides=steps)
    async with LocalCluster(spec) as cluster:
        await cluster.wait_ready()
        (prefill,) = cluster.workers_of(Role.PREFILL)
        await inject(prefill, "slow", CRAWL)
        (decode,) = cluster.workers_of(Role.DECODE)
        call = asyncio.create_task(answers(cluster, together=True))
        await scrape_until(
            decode.metrics, lambda m: m.total("kv_received_bytes_total") > 0, "a part of the KV"
        )
        cluster.kill(prefill)
        os.kill(prefill.engine_pid, signal.SIGKILL)
        got = await asyncio.wait_for(call, 60)
        for (case, wanted), answer in zip(expected.items(), got, strict=True):
            assert told(answer) == told(wanted), case
        assert any(answer.placement.fallback_reason in DEATHS for answer in got)
        await assert_no_leaks(decode.metrics)


async def test_samples_are_as_colocated(split: LocalCluster, colocated: LocalCluster) -> None:
    """One prompt, one transfer; and the first sample is what one alone would be."""
    answers = []
    for cluster in (split, colocated):
        (decode,) = cluster.workers_of(Role.DECODE)
        async with Client(cluster.router_address) as client:
            samples = await ask_samples(client, PROMPT, n=4, temperature=1.0, seed=8)
            (alone,) = await ask_samples(client, PROMPT, temperature=1.0, seed=8)
        assert samples[0] == alone
        assert len({sample.text for sample in samples}) == 4
        answers.append(samples)
        await assert_no_leaks(decode.metrics)
    assert answers[0] == answers[1]


async def test_a_stop_string_stops_the_work(split: LocalCluster) -> None:
    """The decode worker hears of it: nothing runs on, and all blocks come home."""
    (decode,) = split.workers_of(Role.DECODE)
    async with Client(split.router_address) as client:
        whole = await ask(client, PROMPT, max_tokens=40)
        stop = whole.text[20:23]
        answer = await ask(client, PROMPT, max_tokens=1000, stop=stop)
        assert answer.text == whole.text[: whole.text.index(stop)]
        assert answer.stop_reason == stop
        await scrape_until(
            decode.metrics, lambda m: m.total("running_requests") == 0, "nothing runs"
        )
