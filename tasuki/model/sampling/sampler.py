"""Chooses one token per row of logits. Knows nothing about requests beyond what a `Choice` says.

A pure function of each choice and its row: neighbours, workers and retries do not matter. Greedy is
the largest score; with a temperature it is Gumbel-max, the largest score + noise. Of equals the
lowest id wins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tasuki.errors import TasukiError
from tasuki.model.sampling.history import TokenHistory
from tasuki.model.sampling.noise import gumbel, gumbel_of
from tasuki.model.sampling.processors import Choice, processed


class Sampler:
    """Remembers nothing but the token counts of requests that chose in the last call."""

    def __init__(self) -> None:
        self._histories: dict[int, TokenHistory] = {}

    def sample(self, logits: torch.Tensor, choices: Sequence[Choice]) -> list[int]:
        """One token id per row of float32 [n, vocab_size].

        Raises TasukiError naming the row when its logits are not finite.
        """
        assert logits.shape[0] == len(choices), "one row per choice"
        if not choices:
            return []
        _require_finite(logits, choices)
        token_ids = _argmax(logits)
        before, self._histories = self._histories, {}
        for row, choice in enumerate(choices):
            if not choice.params.is_plain_greedy:
                history = self._history(choice, before)
                token_ids[row] = _choose(processed(logits[row], choice, history), choice)
        return token_ids

    def _history(self, choice: Choice, before: dict[int, TokenHistory]) -> TokenHistory | None:
        if not choice.params.counts_tokens:
            return None
        history = before.get(choice.key) or TokenHistory(choice.prompt_token_ids)
        history.catch_up(choice.output_token_ids)
        self._histories[choice.key] = history
        return history


def _require_finite(logits: torch.Tensor, choices: Sequence[Choice]) -> None:
    # NaN shows in both extremes, infinity in one of them; aminmax would take ten times as long
    finite = logits.amax(dim=1).isfinite() & logits.amin(dim=1).isfinite()
    if finite.all():
        return
    row = int(finite.logical_not().nonzero()[0])
    raise TasukiError(
        f"logits of row {row} (position {choices[row].position}) are not finite; the weights or "
        "the KV cache of this worker are damaged",
        reason="logits",
    )


def _argmax(logits: torch.Tensor) -> list[int]:
    """Of each row; the first of equals. NumPy's takes a tenth of the time of torch's on a CPU."""
    if logits.device.type == "cpu":
        ids: list[int] = logits.numpy().argmax(axis=1).tolist()
    else:
        ids = logits.argmax(dim=1).tolist()
    return ids


def _choose(scores: torch.Tensor, choice: Choice) -> int:
    params = choice.params
    if params.temperature == 0:
        return int(scores.argmax())
    if not (params.top_k or params.top_p < 1 or params.min_p):
        noise = gumbel(params.seed, choice.sample_index, choice.position, scores.shape[0])
        return int((scores + noise).argmax())
    left = (scores > -torch.inf).nonzero().flatten()  # ascending: the lowest id comes first
    noise = gumbel_of(left, params.seed, choice.sample_index, choice.position)
    return int(left[(scores[left] + noise).argmax()])
