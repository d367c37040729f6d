"""Whether the first tokens that a prefill worker tells can be those of a request. Pure.

They are taken as they are: an id that the model does not have would end this engine with its next
step, and what nobody asked for would reach a client.
"""

from __future__ import annotations

from tasuki.messages import FirstTokenEvent
from tasuki.request import Request


def can_be(event: FirstTokenEvent, request: Request, vocab_size: int) -> bool:
    """Of `request`, which has none yet: one for each of its samples, with what was asked for."""
    told = [logprob.token_id for logprob in event.logprobs]
    wanted = [] if request.sampling.logprobs is None else event.token_ids
    of_prompt = 0 if request.prompt_logprobs is None else request.prompt_len - 1
    return (
        len(event.token_ids) == request.num_choices
        and all(0 <= token_id < vocab_size for token_id in event.token_ids)
        and told == wanted
        and len(event.prompt_logprobs) == of_prompt
        and 0 <= event.cached_tokens <= request.prompt_len
    )
