"""How much a request may ever need, and what no scheduling could finish: refused when it arrives.

Pure.
"""

from __future__ import annotations

from tasuki.errors import InvalidRequestError, RequestTooLongError
from tasuki.kv.manager import KVCacheManager
from tasuki.request import Request
from tasuki.scheduler.config import Admission, SchedulerConfig


def require_possible(
    config: SchedulerConfig,
    blocks: KVCacheManager,
    prompt_len: int,
    output_len: int,
    max_tokens: int,
) -> None:
    """Raise InvalidRequestError for counts that are none, RequestTooLongError for a request that
    does not fit into the model or into the whole cache. Booleans are no counts.
    """
    for name, value, least in (
        ("prompt length", prompt_len, 1),
        ("output length", output_len, 0),
        ("max_tokens", max_tokens, 1),
    ):
        if type(value) is not int or value < least:
            raise InvalidRequestError(
                f"{name} is {value!r}; expected a whole number of at least {least}"
            )
    if prompt_len + output_len >= config.max_model_len:
        raise RequestTooLongError(
            f"the prompt has {prompt_len} tokens, and {output_len} were generated; this worker "
            f"takes at most {config.max_model_len - 1} and one more"
        )
    most = most_positions(config, prompt_len, max_tokens)
    if not blocks.fits(most):
        capacity = blocks.pool.num_blocks * blocks.layout.block_size
        raise RequestTooLongError(
            f"prompt and output may take {most} positions; the KV cache has {capacity}: "
            "ask for fewer tokens or start the worker with more --kv-blocks"
        )


def most_positions(config: SchedulerConfig, prompt_len: int, max_tokens: int) -> int:
    """Positions a request has at its end, at most."""
    return min(prompt_len + max_tokens, config.max_model_len)


def positions_to_hold(config: SchedulerConfig, request: Request, now: int) -> int:
    """Positions a request must hold blocks for when it is admitted to compute up to `now`."""
    if config.admission is Admission.RESERVE_MAX:
        return most_positions(config, request.prompt_len, request.sampling.max_tokens)
    return request.num_tokens if config.allocate_whole_prompt else now
