"""Samples in an engine: each is a function of prompt, parameters, seed and its index alone."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tasuki.convert.tiny import make_tiny
from tasuki.errors import InvalidRequestError
from tasuki.messages import SamplingParams
from tasuki.request import Request
from tests.engine.test_sampling import load
from tests.integration.streams import prompt

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "nucleus": {"top_p": 0.8, "logprobs": 2},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "all told": {"logprobs": 1, "prompt_logprobs": 0},
}
Told = dict[int, list[Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


def make_request(n: int, key: int = 1, length: int = 90, **params: Any) -> Request:
    sampling = SamplingParams(
        **{"n": n, "max_tokens": 30, "temperature": 1.0, "seed": 9, "ignore_eos": True} | params
    )
    return Request(key, "r", prompt(length), sampling, frozenset(), 0.0)


def run(model: Path, *requests: Request, **settings: Any) -> list[Told]:
    """For each request, by sample: tokens and logprobs, as its updates told them."""
    engine = load(model, **settings)
    told: dict[int, Told] = {one.key: {} for one in requests}
    for one in requests:
        engine.add(one)
    while engine.has_work:
        for update in engine.step():
            mine = told[update.request.group_key].setdefault(update.request.sample_index, [])
            mine += [*update.token_ids, *update.logprobs, *update.prompt_logprobs]
    engine.check_integrity()
    assert engine.blocks.num_free == engine.blocks.pool.num_blocks
    return list(told.values())


@functools.cache
def undisturbed(model: Path, case: str, native: bool = True) -> list[Told]:
    return run(model, make_request(5, **CASES[case]), native=native)


@pytest.mark.parametrize("case", CASES)
def test_samples_differ_and_the_first_is_what_one_alone_would_be(model: Path, case: str) -> None:
    (told,) = undisturbed(model, case)
    (alone,) = run(model, make_request(1, **CASES[case]))
    assert told[0] == alone[0]
    assert len({str(sample) for sample in told.values()}) == 5
    (fewer,) = run(model, make_request(3, **CASES[case]))
    assert fewer == {index: told[index] for index in range(3)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 7},  # the prompt in chunks
        {"max_num_seqs": 2},  # samples that wait
        {"kv_blocks": 12, "prefix_caching": False},  # samples that are preempted
        {"kv_blocks": 12},
        {"admission": "reserve_max", "kv_blocks": 20},
        {"native": False},
    ],
    ids=str,
)
def test_neither_chunks_nor_seats_nor_preemption_change_a_sample(
    model: Path, case: str, settings: dict[str, Any]
) -> None:
    expected = undisturbed(model, case, native=settings.get("native", True))
    assert run(model, make_request(5, **CASES[case]), **settings) == expected


def test_neighbours_change_no_sample(model: Path) -> None:
    cases = list(CASES.values())
    alone = [run(model, make_request(3, length=40 + n, **case))[0] for n, case in enumerate(cases)]
    together = [make_request(3, key=n + 1, length=40 + n, **case) for n, case in enumerate(cases)]
    assert run(model, *together) == alone


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"n": 0}, "n is 0; expected 1 to 64"),
        ({"n": 65}, "n is 65; expected 1 to 64"),
        ({"n": 2, "temperature": 0.0}, "makes all samples the same"),
    ],
)
def test_what_makes_no_sense_is_refused(model: Path, params: dict[str, Any], words: str) -> None:
    engine = load(model)
    with pytest.raises(InvalidRequestError, match=words):
        engine.add(make_request(**{"n": 2} | params))
    one = make_request(2)
    one.output_token_ids = [5]
    with pytest.raises(InvalidRequestError, match="one by one"):
        engine.add(one)
