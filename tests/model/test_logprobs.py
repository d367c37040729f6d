"""Logprobs against transformers' way to compute them, ranks and ties by hand."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasuki.model.sampling.logprobs import ROWS_AT_ONCE, token_logprobs


def test_as_log_softmax() -> None:
    logits = torch.randn(70, 5000, generator=torch.Generator().manual_seed(4)) * 5
    assert len(logits) > 2 * ROWS_AT_ONCE
    token_ids = [(31 * row) % 5000 for row in range(70)]
    wanted = torch.nn.functional.log_softmax(logits, dim=-1)
    got = token_logprobs(logits, token_ids, [row % 21 for row in range(70)])
    for row, one in enumerate(got):
        assert one.token_id == token_ids[row]
        assert abs(one.logprob - wanted[row, token_ids[row]]) < 1e-4
        best = wanted[row].topk(row % 21)
        assert one.top_token_ids == best.indices.tolist()
        torch.testing.assert_close(torch.tensor(one.top_logprobs), best.values, rtol=0, atol=1e-4)
        assert one.rank == 1 + int((logits[row] > logits[row, token_ids[row]]).sum())


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=12, max_size=12), min_size=1), st.integers(0, 20)
)
def test_ties_go_to_the_lowest_id(rows: list[list[int]], count: int) -> None:
    got = token_logprobs(torch.tensor(rows).float(), [5] * len(rows), [count] * len(rows))
    for row, one in zip(rows, got, strict=True):
        wanted = sorted(range(12), key=lambda token_id: (-row[token_id], token_id))[:count]
        assert one.top_token_ids == wanted
        assert one.rank == 1 + sum(logit > row[5] for logit in row)


def test_no_rows() -> None:
    assert token_logprobs(torch.empty(0, 9), [], []) == []
