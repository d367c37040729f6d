"""What a decode worker is asked: a whole request, or one sample that goes on elsewhere. Pure."""

from __future__ import annotations

import msgspec

from router.answer import Answer
from router.generation import Generation
from router.placement import Placement
from tasuki.messages import DecodeRequest


def decode_request(
    placement: Placement,
    generation: Generation,
    answer: Answer,
    sample_index: int | None,
    timeout: float,
) -> DecodeRequest:
    """For `sample_index` alone, with what it has so far; None: all samples, from the beginning.

    Penalties, limits and noise count from the original prompt, so that a sample that goes on says
    what it would have said. What was told of the prompt is not told again.
    """
    sampling, outputs = generation.sampling, []
    if sample_index is not None:
        sampling = msgspec.structs.replace(sampling, n=1)
        outputs = list(answer.token_ids[sample_index])
    if answer.has_tokens:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
    return DecodeRequest(
        request_id=generation.request_id,
        prompt_token_ids=generation.prompt_token_ids,
        output_token_ids=outputs,
        sampling=sampling,
        prefill_candidates=list(placement.candidates),
        local_reason="" if placement.candidates else placement.reason,
        timeout=timeout,
        priority=generation.priority,
        cache_salt=generation.cache_salt,
        sample_index=sample_index or 0,
    )
