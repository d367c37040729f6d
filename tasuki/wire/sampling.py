"""Sampling parameters and logprobs on the wire; the ranges of values are those of
`tasuki.messages.sampling`.

Knows nothing about stop strings beyond that only a router takes them.
"""

from __future__ import annotations

from collections.abc import Iterable

from tasuki.errors import InvalidRequestError
from tasuki.messages import SamplingParams, TokenLogprob
from tasuki.messages.sampling import require_valid
from tasuki.v1 import common_pb2
from tasuki.wire import values

PLAIN = SamplingParams()


def sampling_to_proto(sampling: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        n=sampling.n,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )


def sampling_from_proto(sampling: common_pb2.SamplingParams) -> SamplingParams:
    """What a router or a decode worker sends: it has filled in what a client left out."""
    if not sampling.HasField("max_tokens") or not sampling.HasField("seed"):
        raise InvalidRequestError("sampling lacks max_tokens or seed; a router sets both")
    if sampling.stop:
        raise InvalidRequestError("a worker takes no stop strings; send the request to a router")
    return sampling_from_client(sampling, PLAIN, max_tokens=sampling.max_tokens, seed=sampling.seed)


def sampling_from_client(
    sampling: common_pb2.SamplingParams, defaults: SamplingParams, *, max_tokens: int, seed: int
) -> SamplingParams:
    """What was sent, else `defaults`, with the two numbers that depend on the request.

    Raises InvalidRequestError for a value that makes no sense for any model.
    """
    read = SamplingParams(
        n=sampling.n if sampling.HasField("n") else 1,
        max_tokens=max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=_or(sampling, "temperature", defaults),
        top_k=int(_or(sampling, "top_k", defaults)),
        top_p=_or(sampling, "top_p", defaults),
        min_p=_or(sampling, "min_p", defaults),
        repetition_penalty=_or(sampling, "repetition_penalty", defaults),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        seed=seed,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=list(sampling.stop_token_ids),
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
    )
    require_valid(read)
    return read


def _or(sampling: common_pb2.SamplingParams, name: str, defaults: SamplingParams) -> float:
    """An optional number, which may be zero without being unset."""
    present = sampling.HasField(name)  # type: ignore[arg-type]  # the stubs list fields literally
    number: float = getattr(sampling if present else defaults, name)
    return number


def logprobs_to_proto(logprobs: Iterable[TokenLogprob]) -> list[common_pb2.TokenLogprob]:
    return [
        common_pb2.TokenLogprob(
            token_id=one.token_id,
            logprob=one.logprob,
            rank=one.rank,
            top_token_ids=one.top_token_ids,
            top_logprobs=one.top_logprobs,
        )
        for one in logprobs
    ]


def require_logprobs(tokens: int, logprobs: int) -> None:
    """Raise InvalidRequestError unless so many tokens came with so many logprobs, or with none."""
    if logprobs not in (0, tokens):
        raise InvalidRequestError(
            f"{tokens} tokens came with {logprobs} logprobs; expected one each, or none"
        )


def logprobs_from_proto(logprobs: Iterable[common_pb2.TokenLogprob]) -> list[TokenLogprob]:
    return [_logprob_from_proto(one) for one in logprobs]


def _logprob_from_proto(one: common_pb2.TokenLogprob) -> TokenLogprob:
    if len(one.top_token_ids) != len(one.top_logprobs):
        raise InvalidRequestError(
            f"{len(one.top_token_ids)} top_token_ids came with {len(one.top_logprobs)} "
            "top_logprobs; expected one each"
        )
    return TokenLogprob(
        token_id=one.token_id,
        logprob=values.finite("logprob", one.logprob),
        rank=one.rank,
        top_token_ids=list(one.top_token_ids),
        top_logprobs=[values.finite("logprob", logprob) for logprob in one.top_logprobs],
    )
