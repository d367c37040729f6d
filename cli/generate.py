"""`tasuki generate`: one question to a running cluster, its answer, and where the time went."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import Any

import msgspec

from cli.answer import Answer, Question, Sample, stream_answer
from cli.command import Command
from cli.logprob_table import render_logprobs
from cli.sampling_flags import parse_logit_bias, parse_stop, parse_token_ids
from cli.say import show
from cli.timeline_table import render
from tasuki.client import Client, SamplingOptions
from tasuki.config import setting
from tasuki.errors import ConfigError, UnavailableError

HELP = """\
Sends one prompt to a running cluster (see `tasuki up`), prints the answer as it comes, and then a
table of where the time went: its parts add up to the time to the first token.

  tasuki generate "Why is the sky blue?"
  tasuki generate --raw "Once upon a time" --max-tokens 64 --temperature 0.8 --seed 1
  tasuki generate "Name three colours." --temperature 0.8 --top-p 0.9 --stop "3." --logprobs 2
  tasuki generate "Name a colour." --temperature 1 --n 4
  tasuki generate --token-ids 1,2,3 --ignore-eos --json
  TASUKI_TARGET=127.0.0.1:4000 tasuki generate "Hello"
"""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Every flag of `tasuki generate`."""

    prompt: str = setting("", "What to ask.", metavar="TEXT")
    target: str = setting("127.0.0.1:50051", "The router.", metavar="HOST:PORT")
    raw: bool = setting(False, "Send the prompt as plain text, not as a chat message.")
    token_ids: str = setting("", "Send these token ids instead of text.", metavar="1,2,3")
    n: int | None = setting(None, "Samples: so many answers, each drawn by itself.")
    max_tokens: int | None = setting(None, "Most output tokens; the cluster's default if unset.")
    min_tokens: int | None = setting(None, "Let nothing end the answer before so many tokens.")
    temperature: float | None = setting(
        None, "0 always takes the likeliest token; higher varies more."
    )
    top_k: int | None = setting(None, "Choose among so many of the likeliest tokens; 0: all.")
    top_p: float | None = setting(
        None, "Choose among the likeliest tokens that together have this probability."
    )
    min_p: float | None = setting(
        None, "Choose among tokens at least this many times as likely as the likeliest."
    )
    repetition_penalty: float | None = setting(
        None, "Above 1 makes tokens of prompt and answer less likely."
    )
    presence_penalty: float | None = setting(
        None, "Above 0 makes tokens of the answer less likely, once each."
    )
    frequency_penalty: float | None = setting(
        None, "Above 0 makes tokens of the answer less likely, each time they come."
    )
    logit_bias: str = setting("", "Add to the logits of tokens.", metavar="ID:BIAS,...")
    seed: int | None = setting(None, "Same seed, same answer. Unset: one of the request's own.")
    ignore_eos: bool = setting(False, "Go on after an end-of-sequence token.")
    stop: str = setting(
        "", 'A text that ends the answer; several as a JSON list: ["a", "b"].', metavar="TEXT"
    )
    stop_token_ids: str = setting("", "Tokens that end the answer.", metavar="1,2,3")
    include_stop_str_in_output: bool = setting(False, "Show the stop that ended the answer.")
    logprobs: int | None = setting(
        None, "Show each token's log probability and so many alternatives."
    )
    prompt_logprobs: int | None = setting(None, "Likewise for each token of the prompt.")
    timeout: float = setting(600.0, "Seconds the whole answer may take.", metavar="SECONDS")
    json: bool = setting(False, "Print one JSON object at the end instead of text and table.")

    def __post_init__(self) -> None:
        if bool(self.prompt) == bool(self.token_ids):
            given = "both are" if self.prompt else "neither is"
            raise ConfigError(
                f'expected a prompt or --token-ids, but {given} given; try: tasuki generate "Hello"'
            )
        if not self.timeout > 0:
            raise ConfigError(f"--timeout is {self.timeout}; expected seconds above 0")
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"--seed is {self.seed}; expected 0 to 2**64 - 1")
        for flag, count in (("--max-tokens", self.max_tokens), ("--n", self.n)):
            if count is not None and not 0 <= count < 1 << 32:
                raise ConfigError(f"{flag} is {count}; expected 1 or more")
        host, _, port = self.target.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"--target is {self.target!r}; expected HOST:PORT")
        self.question()

    def question(self) -> Question:
        return Question(
            prompt=self.prompt,
            token_ids=parse_token_ids("--token-ids", self.token_ids),
            raw=self.raw,
            sampling=self.sampling(),
            timeout=self.timeout,
        )

    def sampling(self) -> SamplingOptions:
        """What was given; the cluster knows which values make sense."""
        return SamplingOptions(
            n=self.n,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=parse_logit_bias(self.logit_bias),
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            stop=parse_stop(self.stop),
            stop_token_ids=parse_token_ids("--stop-token-ids", self.stop_token_ids),
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


def run_generate(config: GenerateConfig) -> int:
    """Run the command; returns the exit code. Raises the cluster's typed errors."""
    try:
        return asyncio.run(_generate(config))
    except UnavailableError as error:
        if error.message.startswith(config.target):  # nobody there who could have said more
            hint = "is a cluster running there? `tasuki up` starts one"
            raise UnavailableError(f"{error.message}; {hint}", reason=error.reason) from error
        raise


async def _generate(config: GenerateConfig) -> int:
    shows = _show_nothing if config.json or (config.n or 1) > 1 else _show
    async with Client(config.target) as client:
        answer = await stream_answer(client, config.question(), shows)
    if config.json:
        print(json.dumps(answer_json(answer)), flush=True)
        return 0
    if len(answer.samples) > 1:
        for number, sample in enumerate(answer.samples, 1):
            _show(f"--- sample {number} ---\n{sample.text}\n")
    print(f"\n\n{_tables(answer)}", flush=True)
    return 0


def _tables(answer: Answer) -> str:
    """What was asked for beside the text, and where the time went."""
    tables = []
    if answer.prompt_logprobs:
        tables.append(render_logprobs("prompt", answer.prompt_logprobs))
    tables += [render_logprobs("answer", one.logprobs) for one in answer.samples if one.logprobs]
    return "\n\n".join([*tables, render(answer.last)])


def _show(text: str) -> None:
    show(text, sys.stdout)


def _show_nothing(_: str) -> None:
    """With --json, or several samples, everything comes at the end."""


def answer_json(answer: Answer) -> dict[str, Any]:
    """The answer as one object; times in seconds. Several samples are a list in it."""
    samples = [_sample_json(sample) for sample in answer.samples]
    told = answer.prompt_logprobs
    return {
        **(samples[0] if len(samples) == 1 else {"samples": samples}),
        "placement": msgspec.to_builtins(answer.last.placement),
        "timeline": msgspec.to_builtins(answer.last.timings),
        **({"prompt_logprobs": msgspec.to_builtins(told)} if told else {}),
    }


def _sample_json(sample: Sample) -> dict[str, Any]:
    last = sample.last
    return {
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": None if last.finish_reason is None else str(last.finish_reason),
        "stop_reason": last.stop_reason,
        "usage": msgspec.to_builtins(last.usage),
        **({"logprobs": msgspec.to_builtins(sample.logprobs)} if sample.logprobs else {}),
    }


GENERATE = Command(
    name="generate",
    summary="ask a running cluster, and see where the time went",
    help=HELP,
    config=GenerateConfig,
    run=run_generate,
    positional="prompt",
)
