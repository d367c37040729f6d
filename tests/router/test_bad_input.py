"""Bad input: each case with its code and its words, and nobody else disturbed."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from router.config import RouterConfig
from router.process import Router
from tasuki.errors import ConfigError
from tests.router.conftest import MakeHarness
from tests.router.fake_worker import wait_until

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
CASES: dict[str, tuple[dict[str, Any], grpc.StatusCode, str, str]] = {
    "no prompt": ({}, INVALID, "invalid", "set exactly one of text, token_ids and messages"),
    "empty text": ({"text": ""}, INVALID, "invalid", "the prompt is empty"),
    "empty ids": ({"token_ids": []}, INVALID, "invalid", "the prompt is empty"),
    "empty messages": ({"messages": []}, INVALID, "invalid", "the conversation is empty"),
    "unknown role": (
        {"messages": [("wizard", "x")]}, INVALID, "invalid", "message 0 has role 'wizard'",
    ),
    "too long for the model": (
        {"text": "z" * 2048}, INVALID, "too_long",
        "the prompt has 2048 tokens, with one output token 2049, and this cluster holds at most",
    ),
    "prompt and output too long": (
        {"text": "z" * 2000, "max_tokens": 49}, INVALID, "too_long", "2000 + 49 = 2049 tokens",
    ),
    "max_tokens 0": ({"text": "x", "max_tokens": 0}, INVALID, "invalid", "max_tokens is 0"),
    "max_tokens huge": (
        {"text": "x", "max_tokens": 1 << 21}, INVALID, "invalid", "expected 1 to 1048576",
    ),
    "temperature NaN": (
        {"text": "x", "temperature": float("nan")}, INVALID, "invalid", "temperature is nan",
    ),
    "temperature negative": (
        {"text": "x", "temperature": -0.5}, INVALID, "invalid", "temperature is -0.5",
    ),
    "temperature infinite": (
        {"text": "x", "temperature": float("inf")}, INVALID, "invalid", "temperature is inf",
    ),
    "top_p 0": ({"text": "x", "top_p": 0.0}, INVALID, "invalid", "top_p is 0.0; expected above 0"),
    "min_p 1": ({"text": "x", "min_p": 1.0}, INVALID, "invalid", "min_p is 1.0"),
    "repetition_penalty 0": (
        {"text": "x", "repetition_penalty": 0.0}, INVALID, "invalid", "repetition_penalty is 0.0",
    ),
    "presence_penalty": (
        {"text": "x", "presence_penalty": -2.1}, INVALID, "invalid", "presence_penalty is -2.1",
    ),
    "frequency_penalty": (
        {"text": "x", "frequency_penalty": float("nan")}, INVALID, "invalid", "expected -2 to 2",
    ),
    "min_tokens over max_tokens": (
        {"text": "x", "max_tokens": 3, "min_tokens": 4}, INVALID, "invalid", "min_tokens is 4",
    ),
    "min_tokens over what fits": (
        {"text": "x", "min_tokens": 2048}, INVALID, "invalid", "max_tokens, which is 2047",
    ),
    "bias too large": (
        {"text": "x", "logit_bias": {5: -100.5}}, INVALID, "invalid", "logit_bias of token 5",
    ),
    "bias of no token": (
        {"text": "x", "logit_bias": {300: 1.0}}, INVALID, "invalid", "logit_bias names token 300",
    ),
    "stop token outside": (
        {"text": "x", "stop_token_ids": [300]}, INVALID, "invalid", "has ids 0 to 299",
    ),
    "too many stops": ({"text": "x", "stop": ["a"] * 17}, INVALID, "invalid", "stop has 17 texts"),
    "empty stop": ({"text": "x", "stop": [""]}, INVALID, "invalid", "a stop has 0 characters"),
    "long stop": ({"text": "x", "stop": ["s" * 257]}, INVALID, "invalid", "257 characters"),
    "logprobs 21": (
        {"text": "x", "logprobs": 21}, INVALID, "invalid", "expected unset, or 0 to 20",
    ),
    "prompt_logprobs 99": (
        {"text": "x", "prompt_logprobs": 99}, INVALID, "invalid", "prompt_logprobs is 99",
    ),
    "id outside": (
        {"token_ids": [1, 300, 2]}, INVALID, "invalid",
        "token id 300 at position 1 of the prompt is outside the vocabulary",
    ),
    "unknown model": (
        {"text": "x", "model": "gpt"}, NOT_FOUND, "invalid", "model 'gpt' is not served here",
    ),
    "slo 0": ({"text": "x", "ttft_ms": 0.0}, INVALID, "invalid", "slo.ttft_ms is 0.0"),
    "slo NaN": ({"text": "x", "tpot_ms": float("nan")}, INVALID, "invalid", "slo.tpot_ms is nan"),
    "priority 101": ({"text": "x", "priority": 101}, INVALID, "invalid", "priority is 101"),
    "long cache salt": (
        {"text": "x", "cache_salt": "s" * 257}, INVALID, "invalid", "cache_salt has 257 characters",
    ),
    "long request id": (
        {"text": "x", "request_id": "r" * 257}, INVALID, "invalid", "request_id has 257 characters",
    ),
}  # fmt: skip


async def test_each_refusal_has_its_code_and_words_and_disturbs_nobody(
    harness: MakeHarness,
) -> None:
    async with harness() as h:
        good = [asyncio.create_task(h.outputs(text="good", max_tokens=50)) for _ in range(3)]
        for name, (fields, code, reason, words) in CASES.items():
            error = await h.error(**fields)
            assert error.code() is code, name
            assert (error.trailing_metadata() or {}).get("tasuki-reason") == reason, name
            assert words in (error.details() or ""), name
        for outputs in await asyncio.gather(*good):
            assert outputs[-1].usage.completion_tokens == 50
        assert len(h.decodes[0].decodes) == 3  # no bad one reached a worker
        assert h.metric("requests_total", outcome="rejected") == len(CASES)
        assert h.total("rejections_total") == len(CASES)
        assert h.metric("rejections_total", reason="too_long") == 2


async def test_a_request_cancelled_before_it_starts(harness: MakeHarness) -> None:
    async with harness() as h:
        call = h.generate(text="x")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()
        assert (await h.outputs(text="x", max_tokens=1))[-1].usage.completion_tokens == 1


async def test_too_long_for_the_largest_cache(harness: MakeHarness) -> None:
    async with harness(decode=2) as h:
        await h.decodes[0].report(total_blocks=4, free_blocks=4)
        await h.decodes[1].report(total_blocks=8, free_blocks=8)
        await wait_until(lambda: h.router.service.capacity == 128, "both have reported")
        error = await h.error(text="x" * 128)
        assert error.code() is INVALID
        assert "holds at most 128" in (error.details() or "")
        fits = await h.outputs(text="x" * 100, max_tokens=28)
        assert fits[-1].placement.decode_worker_id == "d1"


async def test_an_unset_max_tokens_is_clipped_to_what_fits(harness: MakeHarness) -> None:
    async with harness(default_max_tokens=10) as h:
        await h.outputs(text="x")
        await h.outputs(text="x" * 2045)
        assert [r.sampling.max_tokens for r in h.decodes[0].decodes] == [10, 3]


@pytest.mark.parametrize("port_of", ["grpc", "page"])
async def test_a_port_in_use_is_named(harness: MakeHarness, port_of: str) -> None:
    async with harness() as h:
        taken = int(getattr(h.router, port_of).address.rpartition(":")[2])
        config = RouterConfig(
            decode_workers="127.0.0.1:1",
            port=taken if port_of == "grpc" else 0,
            metrics_port=taken if port_of == "page" else 0,
        )
        second = Router(config, h.router.model)
        with pytest.raises(ConfigError, match=f"port {taken} on 127.0.0.1 is in use"):
            await second.start()
