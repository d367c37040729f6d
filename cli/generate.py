"""`tasuki generate`: one question to a running cluster, its answer, and where the time went."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import Any

import msgspec

from cli.answer import Answer, Question, stream_answer
from cli.command import Command
from cli.say import show
from cli.timeline_table import render
from tasuki.client import Client
from tasuki.config import setting
from tasuki.errors import ConfigError, UnavailableError

HELP = """\
Sends one prompt to a running cluster (see `tasuki up`), prints the answer as it comes, and then a
table of where the time went: its parts add up to the time to the first token.

  tasuki generate "Why is the sky blue?"
  tasuki generate --raw "Once upon a time" --max-tokens 64 --temperature 0.8 --seed 1
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
    max_tokens: int | None = setting(None, "Most output tokens; the cluster's default if unset.")
    temperature: float = setting(0.0, "0 always takes the likeliest token; higher varies more.")
    seed: int | None = setting(None, "Same seed, same answer. Unset: one of the request's own.")
    ignore_eos: bool = setting(False, "Go on after an end-of-sequence token.")
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
        if self.max_tokens is not None and not 0 <= self.max_tokens < 1 << 32:
            raise ConfigError(f"--max-tokens is {self.max_tokens}; expected 1 or more")
        host, _, port = self.target.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"--target is {self.target!r}; expected HOST:PORT")
        parse_token_ids(self.token_ids)

    def question(self) -> Question:
        return Question(
            prompt=self.prompt,
            token_ids=parse_token_ids(self.token_ids),
            raw=self.raw,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            timeout=self.timeout,
        )


def parse_token_ids(text: str) -> tuple[int, ...]:
    """Turn `1,2,3` into (1, 2, 3). Raises ConfigError naming what is no token id."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    for part in parts:
        if not part.isdecimal() or int(part) >= 1 << 32:
            raise ConfigError(f"--token-ids holds {part!r}; expected whole numbers such as 1,2,3")
    return tuple(int(part) for part in parts)


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
    async with Client(config.target) as client:
        answer = await stream_answer(
            client, config.question(), _show_nothing if config.json else _show
        )
    if config.json:
        print(json.dumps(answer_json(answer)), flush=True)
    else:
        print(f"\n\n{render(answer.last)}", flush=True)
    return 0


def _show(text: str) -> None:
    show(text, sys.stdout)


def _show_nothing(_: str) -> None:
    """With --json everything comes at the end."""


def answer_json(answer: Answer) -> dict[str, Any]:
    """The answer as one object; times in seconds."""
    last = answer.last
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": None if last.finish_reason is None else str(last.finish_reason),
        "usage": msgspec.to_builtins(last.usage),
        "placement": msgspec.to_builtins(last.placement),
        "timeline": msgspec.to_builtins(last.timings),
    }


GENERATE = Command(
    name="generate",
    summary="ask a running cluster, and see where the time went",
    help=HELP,
    config=GenerateConfig,
    run=run_generate,
    positional="prompt",
)
