"""The sampling parameters of `Client.generate`, and how they go onto the wire.

Knows nothing about ranges: the cluster checks those, and says what it expected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from tasuki.v1 import common_pb2


class SamplingOptions(TypedDict, total=False):
    """What may be given, each by its name; None is as good as not given, and leaves the choice to
    the cluster. Names and meanings are those of vLLM and OpenAI.
    """

    n: int | None  # samples: so many outputs of one prompt; needs a temperature above 0
    max_tokens: int | None  # of each sample; unset: what fits, at most the cluster's default
    min_tokens: int | None  # nothing ends the output before so many tokens
    temperature: float | None  # 0 always takes the likeliest token
    top_k: int | None  # choose among so many; 0: among all
    top_p: float | None  # choose among the likeliest that together have this probability
    min_p: float | None  # choose among those at least this many times as likely as the likeliest
    repetition_penalty: float | None  # over prompt and output; 1 changes nothing
    presence_penalty: float | None  # over the output, once for each token in it
    frequency_penalty: float | None  # over the output, for each time a token is in it
    logit_bias: Mapping[int, float] | None  # added to the logits of these token ids
    seed: int | None  # the same seed gives the same answer; unset: one of the request's own
    ignore_eos: bool | None  # go on after an end-of-sequence token
    stop: str | Sequence[str] | None  # texts that end the output
    stop_token_ids: Sequence[int] | None  # tokens that end the output
    include_stop_str_in_output: bool | None  # the text goes up to the end of the stop
    logprobs: int | None  # tell each token's log probability, and so many alternatives
    prompt_logprobs: int | None  # likewise for each token of the prompt but the first


def sampling_to_proto(options: SamplingOptions) -> common_pb2.SamplingParams:
    """Raises ValueError or TypeError for a name that is none, or a value the wire cannot carry."""
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    return common_pb2.SamplingParams(**given)  # type: ignore[arg-type]  # checked at run time
