"""How likely a model found tokens: log-softmax, rank and best alternatives of raw logits.

Raw means before any parameter of sampling, what vLLM calls `raw_logprobs`. Knows nothing about how
a token was chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tasuki.messages import TokenLogprob

ROWS_AT_ONCE = 32  # bounds the memory of a long prompt's rows in double precision


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprob]:
    """One per row of float32 [n, vocab_size]: of the given token, with `counts` alternatives."""
    assert logits.shape[0] == len(token_ids) == len(counts), "one row per token"
    out: list[TokenLogprob] = []
    for start in range(0, len(token_ids), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        out += _of_rows(logits[part].double(), token_ids[part], counts[part])
    return out


def _of_rows(
    logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]
) -> Iterator[TokenLogprob]:
    total = logits.logsumexp(dim=1, keepdim=True)
    own = logits.gather(1, torch.tensor(token_ids)[:, None])
    ranks: list[int] = ((logits > own).sum(dim=1) + 1).tolist()
    logprobs: list[float] = (own - total).flatten().tolist()
    best = _likeliest(logits, max(counts))
    best_ids: list[list[int]] = best.tolist()
    best_logprobs: list[list[float]] = (logits.gather(1, best) - total).tolist()
    for row, count in enumerate(counts):
        yield TokenLogprob(
            token_id=token_ids[row],
            logprob=logprobs[row],
            rank=ranks[row],
            top_token_ids=best_ids[row][:count],
            top_logprobs=best_logprobs[row][:count],
        )


def _likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the largest logits of each row, int64 [n, count], best first and equal ones by id."""
    count = min(count, logits.shape[1])
    if count == 0:
        return torch.empty(logits.shape[0], 0, dtype=torch.int64)
    found, ids = logits.topk(count, dim=1)
    least = found[:, -1:]
    ids = ids.sort(dim=1).values
    order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    ids = ids.gather(1, order)
    # topk takes any of those that are equal to the least one
    for row in ((logits >= least).sum(dim=1) > count).nonzero().flatten().tolist():
        ids[row] = logits[row].sort(descending=True, stable=True).indices[:count]
    return ids
