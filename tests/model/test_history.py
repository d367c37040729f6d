"""A token history, however it catches up, is what counting everything at once gives."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tasuki.model.sampling.history import GROWTH, TokenHistory


@pytest.mark.parametrize("vocab_size", [5, 2000])
@pytest.mark.parametrize("prompt_len", [0, 1, 700])
def test_counts(vocab_size: int, prompt_len: int) -> None:
    rng = random.Random(prompt_len)
    prompt = [rng.randrange(vocab_size) for _ in range(prompt_len)]
    output = [rng.randrange(vocab_size) for _ in range(1500)]
    assert vocab_size == 5 or len(set(output)) > 2 * GROWTH
    history, at = TokenHistory(prompt), 0
    while at < len(output):
        at = min(len(output), at + rng.choice([0, 1, 1, 1, 40]))
        history.catch_up(output[:at])
        if at % 50 == 0 or at == len(output):
            counted = Counter(output[:at])
            ids = history.token_ids.tolist()
            assert sorted(ids) == sorted({*prompt, *output[:at]})
            assert history.output_counts.tolist() == [counted[token_id] for token_id in ids]
