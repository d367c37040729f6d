"""Every processor against the one of transformers: the same tokens masked, the same scores."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as reference

from tasuki.messages import SamplingParams
from tasuki.model.sampling import processors
from tasuki.model.sampling.history import TokenHistory
from tasuki.model.sampling.processors import Choice, processed

VOCAB = 300  # more than the first width of a nucleus

rows = st.integers(0, 2**32).map(
    lambda seed: torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
)
token_lists = st.lists(st.integers(0, VOCAB - 1), max_size=60)
unit = st.floats(0.001, 0.999)


def ours(
    row: torch.Tensor,
    prompt: list[int],
    output: list[int],
    eos: tuple[int, ...] = (),
    **params: Any,
) -> torch.Tensor:
    history = TokenHistory(prompt)
    history.catch_up(output)
    choice = Choice(1, SamplingParams(**params), prompt, output, frozenset(eos))
    return processed(row, choice, history)


def theirs(row: torch.Tensor, tokens: list[int], *chain: Any) -> torch.Tensor:
    """In double precision: what differs is then no rounding."""
    scores, ids = row.double()[None], torch.tensor([tokens], dtype=torch.int64)
    for process in chain:
        scores = process(ids, scores)
    return scores[0]


def assert_same(mine: torch.Tensor, other: torch.Tensor) -> None:
    """Masks are equal, and the rest is, up to the constant that no softmax sees."""
    assert torch.equal(mine == -math.inf, other == -math.inf)
    shift = other.max() - mine.max()
    left = other > -math.inf
    torch.testing.assert_close(mine[left] + shift, other[left], rtol=1e-9, atol=1e-9)


@settings(max_examples=150, deadline=None)
@given(
    row=rows,
    prompt=token_lists.filter(bool),
    output=token_lists,
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 2 * VOCAB),
    top_p=st.just(1.0) | unit,
    min_p=st.just(0.0) | unit,
    repetition=st.just(1.0) | st.floats(0.2, 5),
    min_tokens=st.integers(0, 60),
)
def test_as_transformers(
    row: torch.Tensor,
    prompt: list[int],
    output: list[int],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition: float,
    min_tokens: int,
) -> None:
    stops, eos = [4, 5], (2, 299)
    chain = [
        reference.RepetitionPenaltyLogitsProcessor(repetition),
        reference.MinNewTokensLengthLogitsProcessor(len(prompt), min_tokens, [*stops, *eos]),
        reference.TemperatureLogitsWarper(temperature),
    ]
    chain += [reference.TopKLogitsWarper(top_k)] if top_k else []
    chain += [reference.TopPLogitsWarper(top_p)] if top_p < 1 else []
    chain += [reference.MinPLogitsWarper(min_p)] if min_p else []
    mine = ours(
        row, prompt, output, eos, stop_token_ids=stops, temperature=temperature, top_k=top_k,
        top_p=top_p, min_p=min_p, repetition_penalty=repetition, min_tokens=min_tokens,
    )  # fmt: skip
    assert_same(mine, theirs(row, prompt + output, *chain))


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.999, 0.9999999])
@pytest.mark.parametrize("spread", [0.0001, 1.0, 10.0])
def test_a_nucleus_of_any_width_is_found(top_p: float, spread: float) -> None:
    order = torch.randperm(50_000, generator=torch.Generator().manual_seed(2))
    row = (order / 50_000) ** 2 * spread  # no two are equal
    assert len(set(row.tolist())) == len(row)
    mine = ours(row, [1], [], temperature=1.0, top_p=top_p)
    assert_same(mine, theirs(row, [1], reference.TopPLogitsWarper(top_p)))


def test_of_equal_tokens_a_nucleus_keeps_the_lowest() -> None:
    row = torch.zeros(1000)
    row[500] = 1.0
    mine = ours(row, [1], [], temperature=1.0, top_p=0.5)
    kept = (mine > -math.inf).nonzero().flatten().tolist()
    assert kept == [*range(len(kept) - 1), 500]
    assert 490 < len(kept) < 510


@settings(max_examples=60, deadline=None)
@given(
    row=rows,
    prompt=token_lists,
    output=token_lists,
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=20),
)
def test_penalties_of_the_output_and_bias_by_hand(
    row: torch.Tensor,
    prompt: list[int],
    output: list[int],
    presence: float,
    frequency: float,
    bias: dict[int, float],
) -> None:
    wanted = [
        float(logit)
        - (presence if token_id in output else 0.0)
        - frequency * output.count(token_id)
        + bias.get(token_id, 0.0)
        for token_id, logit in enumerate(row.tolist())
    ]
    mine = ours(
        row, prompt, output, presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias
    )
    torch.testing.assert_close(mine, torch.tensor(wanted, dtype=torch.float64))


def test_a_bias_comes_before_the_mask_of_min_tokens() -> None:
    row = torch.zeros(10)
    arguments: dict[str, Any] = {"logit_bias": {3: 100.0}, "min_tokens": 2}
    assert ours(row, [1], [5], (3,), **arguments)[3] == -math.inf
    assert ours(row, [1], [5, 5], (3,), **arguments)[3] == 100.0
    masked = ours(row, [1], [], (3,), stop_token_ids=[7], ignore_eos=True, **arguments)
    assert (masked == -math.inf).nonzero().flatten().tolist() == [3, 7]


def test_the_largest_allowed_values_stay_finite() -> None:
    row = torch.tensor([3e38, -3e38, 1.0, 0.0])
    mine = ours(
        row, [0, 1, 2, 3], [0, 1], temperature=1e-5, repetition_penalty=1e-5, top_p=0.5,
        min_p=0.5, presence_penalty=-2.0, frequency_penalty=-2.0, logit_bias={2: 100.0},
    )  # fmt: skip
    assert mine.argmax() == 0
    assert not mine.isnan().any()
    assert processors.NUCLEUS_WIDTHS[0] < VOCAB
