"""`tasuki generate` against a small real server: what it sends, what it prints, how it fails."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from cli.answer import Question, stream_answer
from cli.generate import GenerateConfig, answer_json
from cli.main import main
from cli.up import DEMONSTRATION, demonstrate
from tasuki.client import Client, SamplingOptions
from tasuki.v1 import common_pb2
from tests.cli.fake_router import PLACEMENT, TIMINGS, FakeRouter, serving

ROOT = Path(__file__).resolve().parents[2]


async def generate(router: FakeRouter, *argv: str) -> int:
    """Run the command beside the server, in a thread with an event loop of its own."""
    async with serving(router) as address:
        return await asyncio.to_thread(main, ["generate", "--target", address, *argv])


async def test_streams_the_text_then_the_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    router = FakeRouter()
    assert await generate(router, "Why?", "--max-tokens", "3", "--seed", "5") == 0
    text, _, table = capsys.readouterr().out.partition("\n\n")
    assert text == "Hello"
    assert table.startswith("time to first token          123.46 ms\n")
    (request,) = router.requests
    assert [(turn.role, turn.content) for turn in request.messages.messages] == [("user", "Why?")]
    assert (request.sampling.max_tokens, request.sampling.seed) == (3, 5)


@pytest.mark.parametrize(
    ("argv", "template", "form"),
    [
        (["a"], True, "messages"),
        (["a"], False, "text"),
        (["a", "--raw"], True, "text"),
        (["--token-ids", "1,2"], True, "token_ids"),
    ],
)
async def test_the_form_of_the_prompt(argv: list[str], template: bool, form: str) -> None:
    router = FakeRouter(has_chat_template=template)
    assert await generate(router, *argv) == 0
    assert router.requests[0].WhichOneof("prompt") == form
    assert not router.requests[0].sampling.HasField("seed")
    assert not router.requests[0].sampling.HasField("max_tokens")


async def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert await generate(FakeRouter(), "Why?", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == {
        "text": "Hello",
        "token_ids": [10, 11, 12],
        "finish_reason": "length",
        "stop_reason": None,
        "usage": {"prompt_tokens": 9, "completion_tokens": 3, "cached_tokens": 0},
        "placement": PLACEMENT,
        "timeline": TIMINGS,
    }


async def test_every_sampling_flag_is_sent() -> None:
    router = FakeRouter()
    flags = {
        "n": 1, "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_k": 7, "top_p": 0.75,
        "min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "logit_bias": "5:1.5", "seed": 3, "stop": "end",
        "stop_token_ids": "8,9", "logprobs": 0, "prompt_logprobs": 1,
    }  # fmt: skip
    given = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    given += ["--ignore-eos", "--include-stop-str-in-output"]
    assert await generate(router, "Why?", *given) == 0
    expected: dict[str, Any] = flags | {
        "logit_bias": {5: 1.5},
        "stop": ["end"],
        "stop_token_ids": [8, 9],
    }
    expected |= {"ignore_eos": True, "include_stop_str_in_output": True}
    assert router.requests[0].sampling == common_pb2.SamplingParams(**expected)
    names = common_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    assert set(names) == set(expected) == set(SamplingOptions.__annotations__)


async def test_logprobs_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert await generate(FakeRouter(), "Why?", "--logprobs=2", "--prompt-logprobs=0") == 0
    _, prompt, answer, timeline = capsys.readouterr().out.strip().split("\n\n", 3)
    assert prompt.splitlines()[1:] == ["         4    -7.500     12"]
    assert answer.splitlines()[0] == "    answer   logprob   rank  likeliest"
    assert answer.splitlines()[1:] == [
        f"{10 + n:>10}    -0.250      1  {10 + n} -0.250  3 -1.500" for n in range(3)
    ]
    assert timeline.startswith("time to first token")
    assert await generate(FakeRouter(), "Why?", "--logprobs=2", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["logprobs"][0] == {
        "token_id": 10, "logprob": -0.25, "rank": 1, "top_logprobs": {"10": -0.25, "3": -1.5}
    }  # fmt: skip
    assert "prompt_logprobs" not in told


async def test_samples_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert await generate(FakeRouter(), "Why?", "--n=2", "--temperature=1") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("--- sample 1 ---\nHello\n--- sample 2 ---\nHello\n")
    assert await generate(FakeRouter(), "Why?", "--n=2", "--temperature=1", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "cached_tokens": 0}
    told = {"text": "Hello", "token_ids": [10, 11, 12], "finish_reason": "length"}
    assert answer["samples"] == [told | {"stop_reason": None, "usage": usage}] * 2
    assert answer["placement"] == PLACEMENT


async def test_the_json_form_needs_only_an_answer() -> None:
    async with serving(FakeRouter(pieces=())) as address, Client(address) as client:
        answer = await stream_answer(client, Question(prompt="a"), lambda _: None)
    assert answer_json(answer)["token_ids"] == []


async def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = "max_tokens is 0; expected 1 or more"
    router = FakeRouter(error=(grpc.StatusCode.INVALID_ARGUMENT, "invalid", words))
    assert await generate(router, "Why?", "--max-tokens", "0") == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"tasuki generate: {words}\n")


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--target", "127.0.0.1:1", "Why?"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "127.0.0.1:1" in captured.err
    assert "`tasuki up` starts one" in captured.err


def test_no_prompt_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate"]) == 2
    assert "neither is given" in capsys.readouterr().err


async def test_ending_the_command_ends_the_work() -> None:
    router = FakeRouter(endless=True)
    async with serving(router) as address:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "cli", "generate", "--target", address, "Why?",
            cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.read(3), 30) == b"Hel"
        process.terminate()
        await asyncio.wait_for(router.ended.wait(), 10)
        await asyncio.wait_for(process.communicate(), 10)


def test_defaults_are_those_of_up() -> None:
    assert GenerateConfig(prompt="a").target == "127.0.0.1:50051"


async def test_the_demonstration_of_up_shows_question_answer_and_table() -> None:
    out = io.StringIO()
    router = FakeRouter()
    async with serving(router) as address:
        await demonstrate(address, out)
    question, answer, table = out.getvalue().strip().split("\n\n")
    assert question.endswith(DEMONSTRATION)
    assert answer == "Hello"
    assert table.startswith("time to first token")
    # Shorter prompts are not handed over, so a short one would demonstrate nothing.
    assert len(DEMONSTRATION.split()) > 64
