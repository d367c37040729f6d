"""One question to a cluster and its streamed answer. Knows nothing of how the answer is shown."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tasuki.client import Client, GenerateOutput, SamplingOptions, TokenLogprob
from tasuki.errors import UnavailableError


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to ask. `prompt` goes as a chat message where the model has a template, unless `raw`."""

    prompt: str = ""
    token_ids: tuple[int, ...] = ()  # used instead of the prompt when there are any
    raw: bool = False
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    timeout: float = 600.0  # seconds


@dataclass(eq=False)
class Sample:
    """All deltas of one sample; `last` carries its finish reason and usage."""

    last: GenerateOutput
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # if asked for


@dataclass(eq=False)
class Answer:
    """One stream; `last` carries timings and placement."""

    last: GenerateOutput
    samples: list[Sample]
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # if asked for


async def stream_answer(
    client: Client, question: Question, show: Callable[[str], object]
) -> Answer:
    """Ask; call `show` with each piece of text as it comes. Raises the cluster's typed errors."""
    prompt = await _prompt(client, question)
    outputs: list[GenerateOutput] = []
    stream = client.generate(**prompt, timeout=question.timeout, **question.sampling)
    # Closed at once when `show` fails or we are cancelled, so that the workers stop as well.
    async with contextlib.aclosing(stream):
        async for output in stream:
            outputs.append(output)
            if output.text:
                show(output.text)
    if not outputs:
        raise UnavailableError("the stream ended before any token and without an error; try again")
    by_sample: dict[int, list[GenerateOutput]] = {}
    for output in outputs:
        by_sample.setdefault(output.sample_index, []).append(output)
    return Answer(
        last=outputs[-1],
        samples=[_sample(by_sample[index]) for index in sorted(by_sample)],
        prompt_logprobs=[one for output in outputs for one in output.prompt_logprobs],
    )


def _sample(outputs: Sequence[GenerateOutput]) -> Sample:
    return Sample(
        last=outputs[-1],
        text="".join(output.text for output in outputs),
        token_ids=[token_id for output in outputs for token_id in output.token_ids],
        logprobs=[one for output in outputs for one in output.logprobs],
    )


async def _prompt(client: Client, question: Question) -> dict[str, Any]:
    """The one of the client's three prompt arguments that this question uses."""
    if question.token_ids:
        return {"prompt_token_ids": list(question.token_ids)}
    if question.raw:
        return {"prompt": question.prompt}
    model = await client.model_info()
    if not model.has_chat_template:
        return {"prompt": question.prompt}
    return {"messages": [{"role": "user", "content": question.prompt}]}
