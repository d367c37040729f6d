"""Sampling in an engine: chunks, neighbours and preemption change nothing that is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tasuki.config import WorkerConfig
from tasuki.convert.tiny import make_tiny
from tasuki.engine.engine import Engine
from tasuki.errors import InvalidRequestError
from tasuki.messages import FinishReason, SamplingParams, TokenLogprob
from tasuki.request import Request
from tasuki.scheduler.step_plan import StepPlan
from tests.integration.streams import prompt

PARAMS: list[tuple[int, dict[str, Any]]] = [
    (1, {"prompt_logprobs": 1, "logprobs": 1}),
    (2, {"prompt_logprobs": 1, "temperature": 1.0, "top_p": 0.9}),
    (33, {"repetition_penalty": 1.4, "frequency_penalty": 0.4, "logprobs": 20}),
    (64, {"prompt_logprobs": 4, "temperature": 0.8, "top_k": 30}),
    (100, {"min_tokens": 30, "stop_token_ids": list(range(32, 90)), "min_p": 0.02}),
    (150, {"prompt_logprobs": 0, "presence_penalty": 1.5, "logit_bias": {70: 4.0}}),
    (200, {}),
]
Told = tuple[list[int], list[TokenLogprob], list[TokenLogprob]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


def load(model: Path, **settings: Any) -> Engine:
    return Engine.load(WorkerConfig(model=str(model), **settings))


def make_requests() -> list[Request]:
    out = []
    for key, (length, params) in enumerate(PARAMS):
        sampling = SamplingParams(**{"max_tokens": 40, "seed": key, "ignore_eos": True} | params)
        out.append(Request(key, f"r{key}", prompt(length), sampling, frozenset({2}), 0.0))
    return out


def run(engine: Engine, requests: list[Request]) -> list[Told]:
    """Tokens, logprobs and prompt logprobs of each, as its updates told them."""
    told: dict[int, Told] = {one.key: ([], [], []) for one in requests}
    for one in requests:
        engine.add(one)
    while engine.has_work:
        for update in engine.step():
            tokens, logprobs, prompt_logprobs = told[update.request.key]
            assert not (update.prompt_logprobs and prompt_logprobs), "told twice"
            assert not (update.prompt_logprobs and tokens), "told after the first token"
            tokens += update.token_ids
            logprobs += update.logprobs
            prompt_logprobs += update.prompt_logprobs
    engine.check_integrity()
    return [told[one.key] for one in requests]


@pytest.fixture(scope="module")
def alone(model: Path) -> list[Told]:
    engine = load(model)
    return [run(engine, [one])[0] for one in make_requests()]


def test_everything_asked_for_is_told(alone: list[Told]) -> None:
    for (length, params), (tokens, logprobs, prompt_logprobs) in zip(PARAMS, alone, strict=True):
        asked, of_prompt = params.get("logprobs"), params.get("prompt_logprobs")
        assert len(logprobs) == (0 if asked is None else len(tokens))
        assert len(prompt_logprobs) == (0 if of_prompt is None else length - 1)
        assert all(len(one.top_logprobs) == asked for one in logprobs)
        assert all(len(one.top_logprobs) == of_prompt for one in prompt_logprobs)
        assert [one.token_id for one in logprobs] in ([], tokens)
        assert [one.token_id for one in prompt_logprobs] in ([], prompt(length)[1:])
    stopped = alone[4][0]
    assert len(stopped) > 30
    assert not set(stopped[:30]) & set(range(32, 90))


@pytest.mark.parametrize("budget", [7, 64, 1000])
def test_together_and_in_any_chunks(model: Path, alone: list[Told], budget: int) -> None:
    assert run(load(model, max_num_batched_tokens=budget), make_requests()) == alone


@pytest.mark.parametrize("budget", [8, 64])
def test_preempted_and_recomputed(model: Path, alone: list[Told], budget: int) -> None:
    engine = load(model, kv_blocks=16, max_num_batched_tokens=budget)
    assert run(engine, make_requests()) == alone
    assert engine.scheduler.preemptions > 0


def test_a_preemption_amid_the_prompt_keeps_what_was_told_of_it(
    model: Path, alone: list[Told]
) -> None:
    engine = load(model, max_num_batched_tokens=16)
    one = make_requests()[3]
    engine.add(one)
    for _ in range(2):
        engine.step()
    assert one.prompt_logprobs is not None
    assert len(one.prompt_logprobs) == 32
    scheduler = engine.scheduler
    scheduler._preempt(StepPlan(scheduler.config), scheduler.running[-1])
    rows = 0
    while one.prompt_logprobs is not None:
        plan = engine.schedule()
        rows += sum(entry.num_logits for entry in plan.requests)
        for update in engine.update(plan, engine.execute(plan)):
            assert update.prompt_logprobs in ([], alone[3][2])
    assert rows == len(one.prompt_token_ids) - 32
    engine.cancel(one)


def test_as_the_log_softmax_of_transformers(model: Path, alone: list[Told]) -> None:
    other = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for (length, _), (tokens, logprobs, prompt_logprobs) in zip(PARAMS, alone, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt(length) + tokens])
            wanted = other(ids).logits[0].log_softmax(-1)
        for first, told in ((0, prompt_logprobs), (length - 1, logprobs)):
            for row, one in zip(wanted[first:], told, strict=False):
                assert abs(one.logprob - float(row[one.token_id])) < 1e-4
                best = row.topk(len(one.top_logprobs)).values.tolist()
                assert one.top_logprobs == pytest.approx(best, abs=1e-4)


def test_a_stop_token_is_named_and_an_eos_is_not(model: Path, alone: list[Told]) -> None:
    tokens = alone[6][0]
    stop = tokens[9]
    for stops, eos, named in (([stop], {2}, stop), ([stop], {stop}, None), ([], {stop}, None)):
        sampling = SamplingParams(max_tokens=40, stop_token_ids=stops)
        one = Request(1, "r", prompt(200), sampling, frozenset(eos), 0.0)
        run(load(model), [one])
        assert one.output_token_ids == tokens[: tokens.index(stop) + 1]
        assert one.finish_reason is FinishReason.STOP
        assert one.stop_token_id == named


BAD: list[tuple[dict[str, Any], str]] = [
    ({"min_tokens": 41}, "min_tokens is 41"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"top_k": -1}, "top_k is -1"),
    ({"top_p": 1.5}, "top_p is 1.5"),
    ({"min_p": float("nan")}, "min_p is nan"),
    ({"repetition_penalty": -1.0}, "repetition_penalty"),
    ({"presence_penalty": 3.0}, "presence_penalty"),
    ({"frequency_penalty": float("inf")}, "frequency_penalty"),
    ({"logit_bias": {260: 1.0}}, "logit_bias names token 260"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias names token -1"),
    ({"logit_bias": {1: 1e9}}, "logit_bias of token 1"),
    ({"stop_token_ids": [-1]}, "stop_token_ids names token -1"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids has 65"),
    ({"logprobs": -1}, "logprobs is -1"),
    ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
]


@pytest.mark.parametrize(("params", "words"), BAD)
def test_values_that_make_no_sense_are_refused(
    model: Path, params: dict[str, Any], words: str
) -> None:
    engine = load(model)
    sampling = SamplingParams(**{"max_tokens": 40} | params)
    with pytest.raises(InvalidRequestError, match=words):
        engine.add(Request(1, "r", prompt(9), sampling, frozenset(), 0.0))
    assert not engine.has_work


def test_logprobs_that_no_message_could_hold_are_refused(model: Path) -> None:
    sampling = SamplingParams(prompt_logprobs=20)
    with pytest.raises(InvalidRequestError, match="at most 45590 tokens"):
        load(model).validate([70] * 45_591, sampling)
