"""One request that passed validation: what to continue, how, and what counts as good service.

Knows nothing about queues, workers or streams.
"""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass

import xxhash

from router.prompt import prompt_token_ids
from router.served_model import ServedModel
from tasuki.errors import InvalidRequestError, UnknownModelError
from tasuki.messages import SamplingParams
from tasuki.slo import Slo
from tasuki.v1 import common_pb2, inference_pb2

MAX_TOKENS = 1 << 20
MAX_ID_LENGTH = 256
TEMPERATURES = (1e-5, 1e5)  # beyond these, logits / temperature leaves what float32 can tell apart


@dataclass(frozen=True)
class Generation:
    """A request that some worker could serve: prompt + max_tokens fit the largest one."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    slo: Slo

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)


async def read_generation(
    request: inference_pb2.GenerateRequest,
    model: ServedModel,
    *,
    capacity: int,
    default_max_tokens: int,
    default_slo: Slo,
) -> Generation:
    """Check everything and tokenize. `capacity`: most tokens of prompt and output per request.

    Raises InvalidRequestError, RequestTooLongError or UnknownModelError.
    """
    request_id = request.request_id or uuid.uuid4().hex
    if len(request_id) > MAX_ID_LENGTH:
        raise InvalidRequestError(
            f"request_id has {len(request_id)} characters; at most {MAX_ID_LENGTH} are taken"
        )
    if request.model and request.model != model.model_id:
        raise UnknownModelError(
            f"model {request.model[:MAX_ID_LENGTH]!r} is not served here; this cluster serves "
            f"{model.model_id!r}; leave model unset to use it"
        )
    _check_sampling(request.sampling)
    slo = read_slo(request.slo, default_slo)
    ids = await prompt_token_ids(request, model, capacity)
    return Generation(
        request_id=request_id,
        prompt_token_ids=ids,
        sampling=SamplingParams(
            max_tokens=_max_tokens(request.sampling, len(ids), capacity, default_max_tokens),
            temperature=request.sampling.temperature,
            seed=_seed(request.sampling, request_id),
            ignore_eos=request.sampling.ignore_eos,
        ),
        slo=slo,
    )


def read_slo(slo: inference_pb2.Slo, default: Slo) -> Slo:
    """The request's objective, each limit defaulting to the cluster's. Milliseconds on the wire."""
    return Slo(
        ttft=_limit("ttft_ms", slo.ttft_ms) if slo.HasField("ttft_ms") else default.ttft,
        tpot=_limit("tpot_ms", slo.tpot_ms) if slo.HasField("tpot_ms") else default.tpot,
    )


def _limit(field: str, milliseconds: float) -> float:
    """Seconds."""
    if not math.isfinite(milliseconds) or milliseconds <= 0:
        raise InvalidRequestError(
            f"slo.{field} is {milliseconds}; expected a finite number of milliseconds above 0"
        )
    return milliseconds / 1000


def _check_sampling(sampling: common_pb2.SamplingParams) -> None:
    """What can be refused before the prompt is looked at."""
    if sampling.HasField("max_tokens") and not 1 <= sampling.max_tokens <= MAX_TOKENS:
        raise InvalidRequestError(
            f"max_tokens is {sampling.max_tokens}; expected 1 to {MAX_TOKENS}, "
            "or unset for what fits"
        )
    temperature = sampling.temperature
    low, high = TEMPERATURES
    if temperature != 0 and not low <= temperature <= high:  # a NaN is in no range
        raise InvalidRequestError(
            f"temperature is {temperature}; expected 0 (greedy) or {low} to {high}"
        )


def _max_tokens(
    sampling: common_pb2.SamplingParams, prompt_len: int, capacity: int, default: int
) -> int:
    """The given number if it can fit, else an error; unset: the default, clipped to what fits."""
    room = capacity - prompt_len
    if not sampling.HasField("max_tokens"):
        return min(default, room)
    if sampling.max_tokens > room:
        raise InvalidRequestError(
            f"prompt and max_tokens together are {prompt_len} + {sampling.max_tokens} = "
            f"{prompt_len + sampling.max_tokens} tokens; this cluster holds at most {capacity} per "
            f"request; ask for at most {room}, or leave max_tokens unset",
            reason="too_long",
        )
    return sampling.max_tokens


def _seed(sampling: common_pb2.SamplingParams, request_id: str) -> int:
    """The given seed, or a stable one: the same request id gives the same noise on any router."""
    if sampling.HasField("seed"):
        return sampling.seed
    return xxhash.xxh3_64_intdigest(request_id.encode())
