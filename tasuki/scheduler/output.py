"""One step's plan and one step's result: frozen plain data between scheduler and model runner.

What is made once per request and step is a msgspec Struct: a frozen dataclass takes ten times as
long to make. Lists in it belong to the request and are not changed while a step is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from tasuki.kv.manager import BlockCopy
from tasuki.messages import SamplingParams, TokenLogprob
from tasuki.request import Request


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """What to compute for one request: `token_ids` at positions from `num_computed_tokens` on."""

    key: int
    num_computed_tokens: int
    token_ids: list[int]
    block_ids: Sequence[int]  # the whole table, covering every position touched
    samples: bool  # whether the last position's logits choose a token
    num_logits: int  # last positions whose logits are wanted; the others tell of the prompt
    sampling: SamplingParams
    # the request's own lists, not copies: nobody adds to them while its step is computed
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    eos_token_ids: frozenset[int]
    sample_index: int = 0  # of the first token chosen
    num_choices: int = 1  # one token, or the first one of each sample of the request


@dataclass(frozen=True)
class SchedulerOutput:
    step: int
    requests: tuple[ScheduledRequest, ...]
    copies: tuple[BlockCopy, ...] = ()  # made before anything is computed

    @property
    def num_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.requests)


@dataclass(frozen=True)
class ModelRunnerOutput:
    """Sampled tokens by request key, or `sample_key`; a result for another step than the live one
    is stale.
    """

    step: int
    token_ids: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # of those tokens, if wanted
    # of the prompt tokens after those whose logits were wanted
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)


class RequestUpdate(msgspec.Struct, frozen=True, gc=False):
    """What one step did for one request."""

    request: Request
    token_ids: list[int]  # new output tokens: none while the prompt is being computed
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)  # one each, if wanted
    # of the whole prompt but its first token: with the first output token, if wanted
    prompt_logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)
