"""What a cluster answers to Generate, as plain data. Deltas: each output holds only what is new."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from tasuki.errors import TasukiError
from tasuki.messages import FinishReason
from tasuki.v1 import common_pb2, inference_pb2

_FINISH = {
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    common_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    common_pb2.FINISH_REASON_DEADLINE: FinishReason.DEADLINE,
    common_pb2.FINISH_REASON_ERROR: FinishReason.ERROR,
}


@dataclass(frozen=True)
class Usage:
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens found in a prefix cache


@dataclass(frozen=True)
class Placement:
    """Where the work was done."""

    kind: str  # "split" or "local": where the prompt was computed in the end
    reason: str
    decode_worker_id: str
    prefill_worker_id: str  # empty for a local placement
    fallback_reason: str  # empty unless a prefill worker did not deliver everything
    decode_computed_prompt_tokens: int


@dataclass(frozen=True)
class Timings:
    """Where the time went, in seconds. The parts of TTFT add up to it: hop is the residual."""

    ttft: float  # arrival at the router until the first token left it
    tpot: float  # (last - first) / (n - 1)
    e2e: float  # arrival until the last token left
    queue: float  # TTFT part: until placed
    reservation: float  # TTFT part: waiting for KV blocks
    prefill_queue: float  # TTFT part: waiting for a step
    prefill_compute: float  # TTFT part: computing the prompt
    fallback: float  # TTFT part: lost on a prefill worker that did not deliver
    hop: float  # TTFT part: everything between the processes
    transfer: float  # first Announce seen until committed
    exposed_transfer: float  # how much of it the second token had to wait for
    commit_wait: float  # last received segment until committed
    first_decode: float  # committed until the second token
    transfer_bytes: int
    transfer_blocks: int
    slo_result: str  # met, ttft_miss, tpot_miss, both_miss or failed


@dataclass(frozen=True)
class TokenLogprob:
    """How likely the model found one token, before every parameter of sampling."""

    token_id: int
    logprob: float  # natural logarithm
    rank: int  # 1 + how many tokens were likelier
    top_logprobs: dict[int, float]  # the likeliest tokens by id, best first


@dataclass(frozen=True)
class GenerateOutput:
    """Tokens of one sample that became ready together; its last one carries its end, and the last
    one of the stream what is known of the whole request.
    """

    token_ids: tuple[int, ...]
    text: str  # what became certain with these tokens
    index: int  # of the first token among the output tokens of its sample
    finish_reason: FinishReason | None = None  # set on the last one of each sample
    usage: Usage | None = None  # of this sample; set on its last one
    timings: Timings | None = None  # set on the last one of the stream
    placement: Placement | None = None  # likewise
    token_offsets: tuple[float, ...] = ()  # seconds since the decode worker saw the request
    request_id: str = ""
    stop_reason: int | str | None = (
        None  # on a sample's last one: the stop token or string that ended it
    )
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token, if asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # on the first one: from the second token on
    sample_index: int = 0  # which of the `n` samples


def output_from_proto(response: inference_pb2.GenerateResponse) -> GenerateOutput:
    """Raises TasukiError for a finish reason that this client does not know."""
    return GenerateOutput(
        token_ids=tuple(response.token_ids),
        text=response.text,
        index=response.index,
        finish_reason=_finish_reason(response.finish_reason),
        usage=_plain(Usage, response, "usage"),
        timings=_plain(Timings, response, "timings"),
        placement=_plain(Placement, response, "placement"),
        token_offsets=tuple(response.token_offsets),
        request_id=response.request_id,
        sample_index=response.sample_index,
        stop_reason=_stop_reason(response),
        logprobs=tuple(map(_logprob, response.logprobs)),
        prompt_logprobs=tuple(map(_logprob, response.prompt_logprobs)),
    )


def _stop_reason(response: inference_pb2.GenerateResponse) -> int | str | None:
    kind = response.WhichOneof("stop_reason")
    if kind is None:
        return None
    return response.stop_token_id if kind == "stop_token_id" else response.stop_string


def _logprob(one: common_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(
        token_id=one.token_id,
        logprob=one.logprob,
        rank=one.rank,
        top_logprobs=dict(zip(one.top_token_ids, one.top_logprobs, strict=True)),
    )


def _finish_reason(value: common_pb2.FinishReason.ValueType) -> FinishReason | None:
    if value == common_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    if value not in _FINISH:
        raise TasukiError(
            f"finish reason {value} is unknown: the cluster is newer than this client"
        )
    return _FINISH[value]


def _plain(cls: Any, response: inference_pb2.GenerateResponse, field: str) -> Any:
    """The dataclass with the same fields as a message; None when the message is not set."""
    if not response.HasField(field):  # type: ignore[arg-type]  # the stubs list fields literally
        return None
    message = getattr(response, field)
    return cls(**{item.name: getattr(message, item.name) for item in dataclasses.fields(cls)})
