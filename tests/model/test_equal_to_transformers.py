"""Tokens and logits are those of transformers, alone and batched."""

from __future__ import annotations

import pytest
import torch

from tasuki.model.transformer import CausalLM
from tests.model.paged import Paged, Run
from tests.model.reference import NEW_TOKENS, Reference, Stream

TIE = 1e-3  # a first difference is excused where the reference's two best logits are this close
EXCUSED_IN = 200  # at most one request in so many may need that


@pytest.fixture(scope="module", params=[True, False], ids=["native", "torch"])
def model(request: pytest.FixtureRequest, reference: Reference) -> CausalLM:
    return CausalLM.load(reference.directory, native=request.param)


def excused(runs: list[Run], streams: list[Stream]) -> int:
    """How many runs differ from their stream by a tie; fails on any other difference."""
    ties = 0
    for run, stream in zip(runs, streams, strict=True):
        if run.output[:NEW_TOKENS] == stream.tokens:
            continue
        pairs = zip(run.output, stream.tokens, strict=False)
        first = next(i for i, (ours, theirs) in enumerate(pairs) if ours != theirs)
        assert stream.gap(first) < TIE, f"prompt of {len(stream.prompt)}: differs at {first}"
        ties += 1
    return ties


def test_streams_are_varied_enough_to_prove_something(reference: Reference) -> None:
    for stream in reference.streams:
        assert len(set(stream.tokens)) >= 30, len(stream.prompt)


def test_alone(reference: Reference, model: CausalLM) -> None:
    paged = Paged(model)
    runs = [paged.start(stream.prompt, NEW_TOKENS) for stream in reference.streams]
    for run in runs:
        paged.generate([run], NEW_TOKENS)
    assert excused(runs, reference.streams) * EXCUSED_IN <= len(runs)


@pytest.mark.parametrize("budget", [256, 48])
def test_batched(reference: Reference, model: CausalLM, budget: int) -> None:
    paged = Paged(model)
    runs = [paged.start(stream.prompt, NEW_TOKENS) for stream in reference.streams]
    paged.generate(runs, NEW_TOKENS, budget)
    assert excused(runs, reference.streams) * EXCUSED_IN <= len(runs)


def test_teacher_forced_logits(reference: Reference, model: CausalLM) -> None:
    """The reference's tokens are given, so that one difference cannot hide the next."""
    paged = Paged(model)
    runs = [paged.start(stream.prompt, NEW_TOKENS) for stream in reference.streams]
    paged.follow(runs, [stream.tokens[:-1] for stream in reference.streams])
    for run, stream in zip(runs, reference.streams, strict=True):
        assert torch.stack(run.logits).sub(stream.logits).abs().max() < 1e-4, len(stream.prompt)
