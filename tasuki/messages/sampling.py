"""How tokens are chosen, which values of that make sense, and what is told about a choice.

Knows nothing about logits. Names are those of vLLM and OpenAI. Stop strings are not here: text is
the router's, and a worker only knows token ids.
"""

from __future__ import annotations

import math

import msgspec

from tasuki.errors import InvalidRequestError
from tasuki.messages.base import Message

MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKENS = 64
MAX_SAMPLES = 64
MAX_ALTERNATIVES = 20  # of `logprobs` and `prompt_logprobs`
MAX_ANSWER_VALUES = 1 << 20  # keeps all logprobs of a prompt within one message of 16 MiB
VALUES_OF_A_TOKEN = 3  # what a token costs there beside its alternatives
# Beyond these, logits times or over a factor leave what a float32 can tell apart.
FACTORS = (1e-5, 1e5)


class SamplingParams(Message, frozen=True):
    """How to choose tokens. A pure function of these, of the request's own tokens and of its
    logits decides: see tasuki.model.sampling.

    All counts start at the end of the original prompt, on whichever worker a token is chosen.
    """

    n: int = 1  # samples: outputs of their own, which share the prompt and its KV
    max_tokens: int = 128  # of each sample, as all below
    min_tokens: int = 0  # neither EOS nor a stop token comes before so many tokens
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0  # over the output
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)  # by token id
    seed: int = 0  # unsigned 64 bits; the router derives one from the request id if unset
    ignore_eos: bool = False
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: int | None = None  # how many alternatives to tell with each token; None: nothing
    prompt_logprobs: int | None = None  # likewise for each token of the prompt

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the largest logit wins as it is."""
        return (
            self.temperature == 0
            and not self.counts_tokens
            and not self.logit_bias
            and self.min_tokens == 0
        )

    @property
    def counts_tokens(self) -> bool:
        """Whether a choice depends on which tokens came before it."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


class TokenLogprob(Message, frozen=True):
    """How likely the model found one token, before any parameter of sampling: the log-softmax of
    its own logits.
    """

    token_id: int
    logprob: float
    rank: int  # 1 + how many tokens are likelier
    top_token_ids: list[int]  # the likeliest ones, best first, equal ones by id
    top_logprobs: list[float]


def require_valid(sampling: SamplingParams) -> None:
    """Raise InvalidRequestError naming the first value that makes no sense for any model."""
    _require("n", sampling.n, 1, MAX_SAMPLES)
    if sampling.n > 1 and sampling.temperature == 0:
        raise InvalidRequestError(
            f"n is {sampling.n} and temperature 0, which makes all samples the same; expected a "
            "temperature above 0, or n = 1"
        )
    _require("max_tokens", sampling.max_tokens, 1, None)
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {sampling.min_tokens}; expected 0 to max_tokens, "
            f"which is {sampling.max_tokens}"
        )
    if sampling.temperature != 0:
        _require("temperature", sampling.temperature, *FACTORS, "0 (greedy), or ")
    _require("top_k", sampling.top_k, 0, None)
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequestError(
            f"top_p is {sampling.top_p}; expected above 0 and at most 1, which is no limit"
        )
    if not 0 <= sampling.min_p < 1:
        raise InvalidRequestError(
            f"min_p is {sampling.min_p}; expected 0, which is no limit, or more, and below 1"
        )
    _require("repetition_penalty", sampling.repetition_penalty, *FACTORS)
    _require("presence_penalty", sampling.presence_penalty, -2, 2)
    _require("frequency_penalty", sampling.frequency_penalty, -2, 2)
    _require_lists(sampling)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(sampling, name)
        if count is not None:
            _require(name, count, 0, MAX_ALTERNATIVES, "unset, or ")


def _require_lists(sampling: SamplingParams) -> None:
    if len(sampling.logit_bias) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(
            f"logit_bias has {len(sampling.logit_bias)} entries; at most {MAX_LOGIT_BIASES} are "
            "taken"
        )
    for token_id, bias in sampling.logit_bias.items():
        _require(f"logit_bias of token {token_id}", bias, -100, 100)
    if len(sampling.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequestError(
            f"stop_token_ids has {len(sampling.stop_token_ids)} entries; at most "
            f"{MAX_STOP_TOKENS} are taken"
        )


def _require(name: str, value: float, low: float, high: float | None, or_else: str = "") -> None:
    """`low` to `high`, both included; a NaN is in no range, and infinity is refused."""
    if low <= value <= (math.inf if high is None else high) and math.isfinite(value):
        return
    wanted = f"{low} or more" if high is None else f"{low} to {high}"
    raise InvalidRequestError(f"{name} is {value}; expected {or_else}{wanted}")


def require_vocabulary(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequestError naming a token id that the model does not have."""
    for name, ids in (
        ("logit_bias", sampling.logit_bias),
        ("stop_token_ids", sampling.stop_token_ids),
    ):
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"{name} names token {token_id}; this model has ids 0 to {vocab_size - 1}"
                )


def require_answerable(sampling: SamplingParams, prompt_len: int) -> None:
    """Raise InvalidRequestError when the logprobs of a prompt would not fit into an answer."""
    if sampling.prompt_logprobs is None:
        return
    most = MAX_ANSWER_VALUES // (sampling.prompt_logprobs + VALUES_OF_A_TOKEN)
    if prompt_len > most:
        raise InvalidRequestError(
            f"prompt_logprobs is {sampling.prompt_logprobs} and the prompt has {prompt_len} "
            f"tokens; with so many alternatives at most {most} tokens are taken"
        )
