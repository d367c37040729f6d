"""Which tokens one request has had, and how often: what penalties look at.

Kept from step to step, because counting a long prompt anew for every token would cost more than
choosing it. Nothing is in here that prompt and output do not determine.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

GROWTH = 256  # room for so many different new tokens at a time


class TokenHistory:
    """Starts with the prompt; `catch_up` adds the output, whose tokens alone are counted."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        different = dict.fromkeys(prompt_token_ids)
        self._slots = {token_id: slot for slot, token_id in enumerate(different)}
        self._ids = torch.tensor([*different], dtype=torch.int64)
        self._counts = torch.zeros(len(different), dtype=torch.float64)
        self._num_output = 0

    def catch_up(self, output_token_ids: Sequence[int]) -> None:
        """Count the tokens that came since the last time: outputs only ever grow."""
        assert len(output_token_ids) >= self._num_output, "an output token was taken back"
        for token_id in output_token_ids[self._num_output :]:
            slot = self._slot(token_id)
            self._counts[slot] += 1
        self._num_output = len(output_token_ids)

    def _slot(self, token_id: int) -> int:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == self._ids.shape[0]:
            self._ids = torch.cat([self._ids, self._ids.new_zeros(GROWTH)])
            self._counts = torch.cat([self._counts, self._counts.new_zeros(GROWTH)])
        self._ids[slot] = token_id
        return slot

    @property
    def token_ids(self) -> torch.Tensor:
        """Every token of prompt and output once, int64 [n]."""
        return self._ids[: len(self._slots)]

    @property
    def output_counts(self) -> torch.Tensor:
        """How often each of them is in the output, float64 [n]."""
        return self._counts[: len(self._slots)]
