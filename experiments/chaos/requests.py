"""The requests of a chaos run: few and different, so that what each must answer can be known."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

COUNT = 32
LENGTHS = (1, 15, 16, 17, 70, 128, 300, 600, 900)  # tokens; around block and split limits
OUTPUTS = (1, 2, 20, 60, 120)
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.2, "presence_penalty": 0.4, "logprobs": 1},
    {"temperature": 1.0, "n": 2},
)


@dataclass(frozen=True)
class Ask:
    """What is asked. Ids are printable bytes, which every vocabulary has."""

    number: int
    prompt_token_ids: list[int]
    max_tokens: int
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        return int(self.sampling.get("n", 1))


def draw_requests(seed: int, most: int, count: int = COUNT) -> list[Ask]:
    """`count` requests of at most `most` tokens of prompt and output."""
    rng = random.Random(f"requests {seed}")
    asks = []
    for number in range(count):
        length, tokens = rng.choice(LENGTHS), rng.choice(OUTPUTS)
        length = max(1, min(length, most - tokens))
        prompt = [rng.randrange(32, 127) for _ in range(length)]
        sampling = {**rng.choice(SAMPLED), "seed": rng.randrange(1 << 30)}
        if number % 2:
            sampling["ignore_eos"] = True
        asks.append(Ask(number, prompt, tokens, sampling))
    return asks
