"""The engine in process: whatever shares a step, and however often it starts over, tokens stay."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tasuki.config import WorkerConfig
from tasuki.convert.tiny import make_tiny
from tasuki.engine.engine import Engine
from tasuki.errors import ConfigError, InvalidRequestError, ModelError, RequestTooLongError
from tasuki.messages import FinishReason, SamplingParams
from tasuki.request import Request
from tests.integration.streams import prompt

LENGTHS = (1, 15, 16, 17, 64, 100, 300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


def load(model: Path, **settings: int) -> Engine:
    return Engine.load(WorkerConfig(model=str(model), **settings))  # type: ignore[arg-type] # ints


def request(key: int, length: int, temperature: float = 0.0, max_tokens: int = 32) -> Request:
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, seed=key, ignore_eos=True
    )
    return Request(key, f"r{key}", prompt(length), sampling, frozenset(), 0.0)


def run(engine: Engine, requests: list[Request]) -> list[list[int]]:
    for one in requests:
        engine.add(one)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert engine.blocks.num_free == engine.blocks.pool.num_blocks
    return [one.output_token_ids for one in requests]


def make_requests() -> list[Request]:
    return [request(n, length, 0.7 * (n % 2)) for n, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def alone(model: Path) -> list[list[int]]:
    engine = load(model)
    return [run(engine, [one])[0] for one in make_requests()]


def test_together_as_alone(model: Path, alone: list[list[int]]) -> None:
    assert run(load(model), make_requests()) == alone


@pytest.mark.parametrize("budget", [7, 64, 1000])
def test_any_chunking(model: Path, alone: list[list[int]], budget: int) -> None:
    assert run(load(model, max_num_batched_tokens=budget), make_requests()) == alone


def test_preempted_and_recomputed(model: Path, alone: list[list[int]]) -> None:
    engine = load(model, kv_blocks=26, max_num_batched_tokens=256)
    requests = make_requests()
    assert run(engine, requests) == alone
    assert engine.scheduler.preemptions > 0


def test_two_threads_say_the_same(model: Path, alone: list[list[int]]) -> None:
    try:
        assert run(load(model, threads=2), make_requests()) == alone
    finally:
        load(model, threads=1)


def test_the_last_position_ends_a_stream(model: Path) -> None:
    engine = load(model, max_model_len=40)
    one = request(1, 30, max_tokens=1000)
    run(engine, [one])
    assert one.num_tokens == 40
    assert one.finish_reason is FinishReason.LENGTH


def test_warm_up_measures_and_leaves_nothing(model: Path) -> None:
    engine = load(model)
    engine.warm_up()
    assert engine.prefill_tokens_per_second > 0
    assert engine.blocks.num_free == engine.blocks.pool.num_blocks
    engine.check_integrity()


def test_the_token_budget_is_measured_where_none_is_given(model: Path) -> None:
    measured, given = load(model), load(model, max_num_batched_tokens=48)
    measured.warm_up()
    given.warm_up()
    assert 16 <= measured.scheduler.config.max_num_batched_tokens <= 2048
    assert given.scheduler.config.max_num_batched_tokens == 48
    assert measured.scheduler.prefix_queries == 0
    assert measured.blocks.reset_prefix_cache() == 0  # nothing of it can be found


def test_what_cannot_be_computed_is_refused(model: Path) -> None:
    engine = load(model, kv_blocks=8)
    with pytest.raises(RequestTooLongError, match="128"):
        engine.add(request(1, 120, max_tokens=50))
    with pytest.raises(InvalidRequestError, match="empty"):
        engine.add(request(2, 0))
    with pytest.raises(InvalidRequestError, match="temperature"):
        engine.add(request(3, 5, temperature=float("nan")))
    assert not engine.has_work


def test_a_sliding_window_shorter_than_the_context_is_refused(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "sliding")
    file = tmp_path / "sliding" / "config.json"
    config = json.loads(file.read_text()) | {"sliding_window": 128}
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match="sliding_window of 128"):
        load(tmp_path / "sliding")
    assert load(tmp_path / "sliding", max_model_len=128).max_model_len == 128


def test_positions_that_are_never_served_cost_nothing(
    model: Path, tmp_path: Path, alone: list[list[int]]
) -> None:
    """A table of all of these would take 120 GB."""
    huge = shutil.copytree(model, tmp_path / "huge")
    values = json.loads((huge / "config.json").read_text())
    (huge / "config.json").write_text(json.dumps(values | {"max_position_embeddings": 2**30}))
    engine = load(huge, max_model_len=400)
    engine.warm_up()
    assert run(engine, [request(6, LENGTHS[6])]) == [alone[6]]
    with pytest.raises(ModelError, match="MiB of weights"):
        load(huge)


def test_settings_that_do_not_fit_the_model_are_refused(model: Path, tmp_path: Path) -> None:
    for settings, words in (
        ({"max_model_len": 4000}, "max-model-len"),
        ({"threads": 0}, "threads"),
        ({"block_size": 24}, "block-size"),
        ({"max_num_seqs": 0}, "max-num-seqs"),
    ):
        with pytest.raises(ConfigError, match=words):
            load(model, **settings)
    with pytest.raises(ModelError, match="does not exist"):
        load(tmp_path / "nothing")
