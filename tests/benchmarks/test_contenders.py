"""Both sides of the engine benchmark compute the same, and all of what they are timed for."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engine import prefill_run
from benchmarks.tasuki_engine import TasukiEngine
from benchmarks.transformers_model import TransformersModel
from tasuki.convert.tiny import make_tiny
from tests.integration.streams import prompt

LENGTH = 40
PROMPTS = [prompt(LENGTH, seed) for seed in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


def test_every_request_stays_in_the_batch_while_it_is_timed(model: Path) -> None:
    """A step takes one prompt, so the first ones are ahead; `decode` asserts that none ends."""
    ours = TasukiEngine.load(model, chunk=LENGTH)
    for _ in range(2):  # `stop` leaves room for the next one
        ours.start(PROMPTS, tokens=12)
        assert ours.decode(steps=12) > 0
        lengths = [len(tokens) for tokens in ours.stop()]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[-1] == 13  # its first token, and one of each step


def test_steps_that_not_all_requests_take_part_in_are_refused(model: Path) -> None:
    ours = TasukiEngine.load(model, chunk=LENGTH)
    ours.start(PROMPTS, tokens=4)
    with pytest.raises(AssertionError, match="every request"):
        ours.decode(steps=40)


def test_another_chunk_says_the_same(model: Path) -> None:
    ours = TasukiEngine.load(model, chunk=16)
    other = ours.with_chunk(64)
    assert ours.prefill(prompt(50)).token_id == other.prefill(prompt(50)).token_id


def test_each_call_takes_the_next_prompt(model: Path) -> None:
    ours = TasukiEngine.load(model, chunk=64)
    tokens: list[int] = []
    run = prefill_run(ours, PROMPTS[:2], tokens)
    assert min(run(), run()) > 0
    assert tokens == [ours.prefill(one).token_id for one in PROMPTS[:2]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_transformers_says_what_we_say(model: Path, attention: str) -> None:
    ours, theirs = TasukiEngine.load(model, chunk=64), TransformersModel(model, attention)
    assert ours.prefill(prompt(50)).token_id == theirs.prefill(prompt(50)).token_id
    ours.start(PROMPTS, tokens=8)
    theirs.start(PROMPTS, tokens=8)
    assert min(ours.decode(8), theirs.decode(8)) > 0
    assert [tokens[:9] for tokens in ours.stop()] == theirs.stop()
