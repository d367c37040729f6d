"""Turns the logits of one row into the scores to choose by, in the order of vLLM and transformers:
penalties, logit bias, min_tokens, temperature, top-k, top-p, min-p.

Knows nothing about noise or batches. Everything is in double precision, so that no combination of
values that passed validation can overflow or make two different logits equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tasuki.messages import SamplingParams
from tasuki.model.sampling.history import TokenHistory

NUCLEUS_WIDTHS = (256, 4096)  # a full sort is dear, and a nucleus is mostly small


@dataclass(frozen=True, slots=True)
class Choice:
    """One token to be chosen, and all that it may depend on beside its logits."""

    key: int  # of the sample; never used twice
    params: SamplingParams
    prompt_token_ids: Sequence[int]  # the original prompt
    output_token_ids: Sequence[int]  # all tokens chosen so far, on whichever worker
    eos_token_ids: frozenset[int] = frozenset()
    sample_index: int = 0

    @property
    def position(self) -> int:
        """Of the token to be chosen, counted from the beginning of the prompt."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


def processed(logits: torch.Tensor, choice: Choice, history: TokenHistory | None) -> torch.Tensor:
    """Scores of float32 logits [vocab_size], as float64; -inf for tokens that may not be chosen.

    `history` must have caught up, and may be missing where no penalty looks at it. With a
    temperature, the largest score is 0.
    """
    params = choice.params
    scores = logits.double()
    if params.counts_tokens:
        assert history is not None, "penalties need the tokens so far"
        _penalize(scores, params, history)
    if params.logit_bias:
        biased = torch.tensor([*params.logit_bias], dtype=torch.int64)
        scores[biased] += torch.tensor([*params.logit_bias.values()], dtype=torch.float64)
    if len(choice.output_token_ids) < params.min_tokens:
        scores[[*choice.eos_token_ids, *params.stop_token_ids]] = -math.inf
    if params.temperature > 0:
        # relative to the best one, no temperature can overflow
        scores = (scores - scores.max()).div_(params.temperature)
        scores = _restrict(scores, params)
    return scores


def _penalize(scores: torch.Tensor, params: SamplingParams, history: TokenHistory) -> None:
    ids, counts = history.token_ids, history.output_counts
    had = scores[ids]
    factor = params.repetition_penalty
    had = torch.where(had < 0, had * factor, had / factor)
    had -= params.frequency_penalty * counts
    had -= params.presence_penalty * (counts > 0)
    scores[ids] = had


def _restrict(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Mask what top-k, top-p and min-p leave out; `scores` are relative to the best one."""
    if 0 < params.top_k < scores.shape[0]:
        least = scores.topk(params.top_k).values[-1]  # equal ones stay, as in transformers
        scores = scores.masked_fill(scores < least, -math.inf)
    if params.top_p < 1:
        scores = _nucleus(scores, params.top_p)
    if params.min_p > 0:
        scores = scores.masked_fill(scores < math.log(params.min_p), -math.inf)
    return scores


def _nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the likeliest tokens, the last of which brings them to `top_p`; of equal ones the lowest
    ids ("The curious case of neural text degeneration", Holtzman et al., 2020).
    """
    vocab_size = scores.shape[0]
    total = scores.exp().sum()
    spare = (1 - top_p) * total  # what may be left out
    for width in (*NUCLEUS_WIDTHS, vocab_size):
        best = scores.topk(min(width, vocab_size)).values
        weights = best.exp()
        below = (total - weights.sum()).clamp_(min=0)
        with_below = below + weights.flip(0).cumsum(0).flip(0)  # a token and all that follow it
        count = max(1, int((with_below > spare).sum()))
        if count < width:
            break
    least = best[count - 1]
    kept = scores > least
    equal = (scores == least).nonzero().flatten()
    kept[equal[: count - int(kept.sum())]] = True
    return scores.masked_fill(~kept, -math.inf)
