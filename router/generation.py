"""One request that passed validation: what to continue, how, and what counts as good service.

Knows nothing about queues, workers or streams.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import xxhash

from router.prompt import prompt_token_ids
from router.served_model import ServedModel
from tasuki.errors import InvalidRequestError, UnknownModelError
from tasuki.messages import SamplingParams
from tasuki.messages.sampling import require_answerable, require_valid, require_vocabulary
from tasuki.slo import Slo
from tasuki.v1 import common_pb2, inference_pb2
from tasuki.wire.sampling import sampling_from_client

MAX_TOKENS = 1 << 20
MAX_ID_LENGTH = 256
MAX_PRIORITY = 100
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
PLAIN = SamplingParams()  # greedy, without limits or penalties


@dataclass(frozen=True)
class Generation:
    """A request that some worker could serve: prompt + max_tokens fit the largest one."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    slo: Slo
    stop: tuple[str, ...] = ()  # texts that end the output
    include_stop: bool = False  # the text goes up to the end of the stop that ended it
    priority: int = 0  # lower is more important, where workers order by it
    cache_salt: str = ""  # requests with different ones share no cached prefix
    outputs: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Tokens of each sample that another router gave before it was gone; empty: it is new."""
    ended: frozenset[int] = frozenset()  # samples that have their end already

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
    default_sampling: SamplingParams = PLAIN,
) -> Generation:
    """Check everything and tokenize. `capacity`: most tokens of prompt and output per request.

    `default_sampling` holds temperature, top_k, top_p, min_p and repetition_penalty of a request
    that leaves them unset.

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
    given = request.sampling
    _check_max_tokens(given)
    sampling = sampling_from_client(
        given,
        default_sampling,
        max_tokens=given.max_tokens if given.HasField("max_tokens") else MAX_TOKENS,
        seed=_seed(given, request_id),
    )
    require_vocabulary(sampling, model.vocab_size)
    _check_stops(given.stop)
    _check_scheduling(request)
    slo = read_slo(request.slo, default_slo)
    ids = await prompt_token_ids(request, model, capacity)
    require_answerable(sampling, len(ids))
    most = _max_tokens(given, len(ids), capacity, max(default_max_tokens, sampling.min_tokens))
    sampling = msgspec.structs.replace(sampling, max_tokens=most)
    require_valid(sampling)  # min_tokens may be more than what fits
    return Generation(
        request_id=request_id,
        prompt_token_ids=ids,
        sampling=sampling,
        slo=slo,
        stop=tuple(given.stop),
        include_stop=given.include_stop_str_in_output,
        priority=request.priority,
        cache_salt=request.cache_salt,
        outputs=_outputs(request, sampling, model.vocab_size),
        ended=frozenset(output.sample_index for output in request.outputs if output.ended),
    )


def _outputs(
    request: inference_pb2.GenerateRequest, sampling: SamplingParams, vocab_size: int
) -> dict[int, list[int]]:
    """What every sample has; nothing at all for a request that is new."""
    if not request.outputs:
        return {}
    found: dict[int, list[int]] = {}
    for output in request.outputs:
        ids, index = list(output.token_ids), output.sample_index
        if index >= sampling.n or index in found:
            raise InvalidRequestError(
                f"outputs name sample {index}, of {sampling.n}; expected each at most once"
            )
        if len(ids) > sampling.max_tokens or any(token_id >= vocab_size for token_id in ids):
            raise InvalidRequestError(
                f"outputs of sample {index} are {len(ids)} tokens; expected at most max_tokens, "
                f"{sampling.max_tokens}, with ids below {vocab_size}"
            )
        found[index] = ids
    if all(output.ended for output in request.outputs) and len(found) == sampling.n:
        raise InvalidRequestError("outputs say that every sample has ended; nothing is left to do")
    return {index: found.get(index, []) for index in range(sampling.n)}


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


def _check_max_tokens(sampling: common_pb2.SamplingParams) -> None:
    """What can be refused before the prompt is looked at."""
    if sampling.HasField("max_tokens") and not 1 <= sampling.max_tokens <= MAX_TOKENS:
        raise InvalidRequestError(
            f"max_tokens is {sampling.max_tokens}; expected 1 to {MAX_TOKENS}, "
            "or unset for what fits"
        )


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(f"stop has {len(stops)} texts; at most {MAX_STOPS} are taken")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequestError(
                f"a stop has {len(stop)} characters; expected 1 to {MAX_STOP_CHARACTERS}"
            )


def _check_scheduling(request: inference_pb2.GenerateRequest) -> None:
    if abs(request.priority) > MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority is {request.priority}; expected -{MAX_PRIORITY} to {MAX_PRIORITY}, "
            "lower being more important"
        )
    if len(request.cache_salt) > MAX_ID_LENGTH:
        raise InvalidRequestError(
            f"cache_salt has {len(request.cache_salt)} characters; "
            f"at most {MAX_ID_LENGTH} are taken"
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
