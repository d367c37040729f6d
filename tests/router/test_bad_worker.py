"""What a decode worker says is believed only as far as it can be true."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec
import pytest

from router.workers import decode_call
from router.workers.decode_call import DecodeCall, WorkerSilentError
from tasuki.messages import DecodeRequest, SamplingParams, TokenLogprob
from tasuki.wire.decode import WireDecodeEvent
from tests.router.conftest import MakeHarness
from tests.router.fake_worker import finished, place_event, spell, tokens, wait_until

PROMPT = list(range(100))
LOGPROB = TokenLogprob(token_id=65, logprob=-1.0, rank=3, top_token_ids=[], top_logprobs=[])
ASKED = DecodeRequest(
    request_id="r",
    prompt_token_ids=PROMPT,
    output_token_ids=[],
    sampling=SamplingParams(max_tokens=3),
    prefill_candidates=[],
)

NONSENSE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no such token": ({}, {"token_ids": [300]}),
    "unasked logprobs": ({}, {"logprobs": [LOGPROB]}),
    "no logprobs": ({"logprobs": 2}, {}),
    "those of another token": ({"logprobs": 2}, {"token_ids": [66], "logprobs": [LOGPROB]}),
    "no logprobs of the prompt": ({"prompt_logprobs": 0}, {}),
    "unasked logprobs of the prompt": ({}, {"prompt_logprobs": [LOGPROB] * 99}),
}


@pytest.mark.parametrize(("asked", "said"), NONSENSE.values(), ids=NONSENSE)
async def test_tokens_that_cannot_be_reach_nobody(
    harness: MakeHarness, asked: dict[str, Any], said: dict[str, Any]
) -> None:
    async def script(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
        yield place_event(request)
        yield msgspec.structs.replace(tokens(0, 65), **said)
        yield finished(request, 1)

    async with harness() as h:
        h.decodes[0].script = script
        error = await h.error(token_ids=PROMPT, max_tokens=3, **asked)
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "broke the protocol" in (error.details() or "")
        h.decodes[0].script = spell
        assert len(await h.outputs(token_ids=PROMPT, max_tokens=3)) == 4


async def test_logprobs_of_a_prompt_are_told_once(harness: MakeHarness) -> None:
    async def script(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
        yield place_event(request)
        for index in range(2):
            yield msgspec.structs.replace(tokens(index, 65), prompt_logprobs=[LOGPROB] * 99)

    async with harness() as h:
        h.decodes[0].script = script
        call = h.generate(token_ids=PROMPT, max_tokens=3, prompt_logprobs=0)
        assert len((await call.read()).prompt_logprobs) == 99
        with pytest.raises(grpc.aio.AioRpcError, match="broke the protocol"):
            await call.read()


async def test_a_usage_of_another_prompt(harness: MakeHarness) -> None:
    async def script(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
        yield tokens(0, 65)
        yield finished(request, 1, prompt_tokens=7)

    async with harness() as h:
        h.decodes[0].script = script
        assert "7 prompt tokens" in await h.words(token_ids=PROMPT, max_tokens=3)


async def mute(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
    await asyncio.Event().wait()
    yield place_event(request)


async def test_a_worker_that_fell_silent_before_it_was_called_is_given_up(
    harness: MakeHarness,
) -> None:
    """It can be lost between being chosen and being called."""
    async with harness(report_timeout=0.2) as h:
        h.decodes[0].script, h.decodes[0].silent = mute, True
        worker = h.router.registry.worker(h.decodes[0].address)
        await wait_until(lambda: not worker.live, "it is lost")
        with pytest.raises(WorkerSilentError):
            async with asyncio.timeout(5):
                await anext(DecodeCall(worker, ASKED, 300).events())


async def test_a_cancel_in_the_moment_of_giving_up_is_a_cancel(
    harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_call, "SILENCE", 0.0)
    async with harness(report_timeout=0.2) as h:
        h.decodes[0].script = mute
        worker = h.router.registry.worker(h.decodes[0].address)
        events = DecodeCall(worker, ASKED, 300).events()
        reading = asyncio.create_task(anext(events))
        await wait_until(lambda: h.decodes[0].running == 1, "it is called")

        def leave(silent: float) -> None:
            asyncio.get_running_loop().call_later(0.0, reading.cancel)  # with its own giving up

        worker.on_loss.add(leave)
        h.decodes[0].silent = True
        await asyncio.wait([reading], timeout=5)
        assert reading.cancelled()
