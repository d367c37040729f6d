"""What one step's result means for one request: its progress, its next token, its other samples.

Knows neither queues nor blocks.
"""

from __future__ import annotations

from tasuki.request import Request, sample_key
from tasuki.scheduler.output import ModelRunnerOutput, RequestUpdate, ScheduledRequest


def take_result(
    request: Request, entry: ScheduledRequest, result: ModelRunnerOutput, max_model_len: int
) -> list[RequestUpdate]:
    """One update, and one for each sample that split off. Says who has ended; ends nobody."""
    done, start = len(entry.token_ids), entry.num_computed_tokens
    prompt_left = len(request.prompt_token_ids) - start
    if prompt_left > 0:
        request.computed_prompt_tokens += min(done, prompt_left)
        request.add_prompt_logprobs(result.prompt_logprobs.get(entry.key, ()))
    request.num_computed_tokens = start + done
    if not entry.samples:
        return [RequestUpdate(request, [])]
    token_id = result.token_ids[entry.key]
    request.append(token_id, max_model_len)
    updates = [_update(request, token_id, result)]
    if entry.num_choices > 1:
        others = range(1, entry.num_choices)
        first_tokens = [result.token_ids[sample_key(entry.key, index)] for index in others]
        for sample in request.split(first_tokens, max_model_len):
            updates.append(_update(sample, sample.output_token_ids[0], result))
    return updates


def _update(request: Request, token_id: int, result: ModelRunnerOutput) -> RequestUpdate:
    logprob = result.logprobs.get(request.key)
    if logprob is None and request.prompt_logprobs is None:
        return RequestUpdate(request, [token_id])
    logprobs = [] if logprob is None else [logprob]
    return RequestUpdate(request, [token_id], logprobs, request.take_prompt_logprobs())
