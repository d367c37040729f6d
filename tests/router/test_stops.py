"""Stop strings end to end: what a client reads, what it costs, and what the worker is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tasuki.messages import DecodeRequest, DispatchedEvent, FinishReason, TokensEvent
from tasuki.v1 import common_pb2
from tasuki.wire.decode import WireDecodeEvent
from tests.router.conftest import MakeHarness
from tests.router.fake_worker import Script, finished, place_event, tokens, wait_until

STOP = common_pb2.FINISH_REASON_STOP


def saying(text: str, at_once: int = 1, reason: FinishReason = FinishReason.LENGTH) -> Script:
    """A script that says the bytes of `text`, so many in one message."""

    async def script(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
        yield place_event(request)
        said = list(text.encode())
        for index in range(0, len(said), at_once):
            yield tokens(index, *said[index : index + at_once])
        yield finished(request, len(said), reason)

    return script


@pytest.mark.parametrize("at_once", [1, 2, 5, 40])
@pytest.mark.parametrize(
    ("stop", "include", "text", "ended_by", "count"),
    [
        (["!"], False, "Grüße 😀 stopp", "!", 19),
        (["!"], True, "Grüße 😀 stopp!", "!", 19),
        (["😀"], False, "Grüße ", "😀", 12),
        (["ß", "stopped", "op"], False, "Grü", "ß", 6),
        (["stopped", "pp"], False, "Grüße 😀 sto", "pp", 18),
        (["stop", "stopp"], False, "Grüße 😀 ", "stop", 17),
        (["e 😀 st", "üß"], True, "Grüß", "üß", 6),
    ],
)
async def test_text_ends_at_the_stop_and_usage_with_its_last_token(
    harness: MakeHarness,
    at_once: int,
    stop: list[str],
    include: bool,
    text: str,
    ended_by: str,
    count: int,
) -> None:
    whole = "Grüße 😀 stopp! never said"
    async with harness() as h:
        h.decodes[0].script = saying(whole, at_once)
        outputs = await h.outputs(text="x", stop=stop, include_stop_str_in_output=include)
        assert "".join(output.text for output in outputs) == text
        ids = [token_id for output in outputs for token_id in output.token_ids]
        assert ids == list(whole.encode())[:count]
        assert sum(len(output.token_offsets) for output in outputs) == count
        last = outputs[-1]
        assert (last.finish_reason, last.stop_string) == (STOP, ended_by)
        assert (last.usage.completion_tokens, last.usage.prompt_tokens) == (count, 1)
        assert last.timings.slo_result == "met"
        await wait_until(lambda: h.decodes[0].running == 0, "the Decode stream is over")
        assert h.metric("requests_total", outcome="completed") == 1


async def test_a_stream_that_would_never_end_is_cancelled(harness: MakeHarness) -> None:
    async def endless(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
        yield place_event(request)
        yield tokens(0, *range(97, 97 + 26))
        await asyncio.Event().wait()

    async with harness() as h:
        h.decodes[0].script = endless
        outputs = await h.outputs(text="x", stop=["xyz"], max_tokens=2000)
        assert "".join(output.text for output in outputs) == "abcdefghijklmnopqrstuvw"
        assert outputs[-1].usage.completion_tokens == 26
        await wait_until(lambda: h.decodes[0].cancelled == 1, "the worker hears of the end")


async def test_what_only_looked_like_a_stop_is_said_in_the_end(harness: MakeHarness) -> None:
    async with harness() as h:
        h.decodes[0].script = saying("a stop, a sto")
        outputs = await h.outputs(text="x", stop=["stop!"])
        assert [o.text for o in outputs][-3:] == ["", "", "sto"]
        assert "".join(output.text for output in outputs) == "a stop, a sto"
        assert outputs[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert outputs[-1].WhichOneof("stop_reason") is None


async def test_a_stop_may_be_completed_by_the_end_itself(harness: MakeHarness) -> None:
    """Bytes that are no character become certain, as one that stands for them, at the end."""

    async def script(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
        yield place_event(request)
        yield tokens(0, 65, 0xC3)
        yield finished(request, 2)

    async with harness() as h:
        h.decodes[0].script = script
        outputs = await h.outputs(text="x", stop=["\N{REPLACEMENT CHARACTER}"])
        assert "".join(output.text for output in outputs) == "A"
        assert outputs[-1].stop_string == "\N{REPLACEMENT CHARACTER}"
        assert outputs[-1].finish_reason == STOP
        assert outputs[-1].usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [(0, "a"), (1, "a"), (2, "a.b"), (3, "a.b"), (5, "a.b.c"), (6, "a.b.c.")],
)
async def test_before_min_tokens_no_stop_counts(
    harness: MakeHarness, min_tokens: int, text: str
) -> None:
    async with harness() as h:
        h.decodes[0].script = saying("a.b.c.")
        outputs = await h.outputs(text="x", stop=["."], min_tokens=min_tokens)
        assert "".join(output.text for output in outputs) == text
        assert (outputs[-1].finish_reason == STOP) == (min_tokens < 6)
        [request] = h.decodes[0].decodes
        assert request.sampling.min_tokens == min_tokens


async def test_a_stop_token_is_no_text_unless_asked_for(harness: MakeHarness) -> None:
    async def script(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
        yield place_event(request)
        yield tokens(0, 65, 66)
        yield finished(request, 2, FinishReason.STOP, stop_token_id=66)

    for include, text in ((False, "A"), (True, "AB")):
        async with harness() as h:
            h.decodes[0].script = script
            fields: dict[str, Any] = {"include_stop_str_in_output": include}
            outputs = await h.outputs(text="x", stop_token_ids=[66], **fields)
            assert "".join(output.text for output in outputs) == text
            assert [id_ for output in outputs for id_ in output.token_ids] == [65, 66]
            assert outputs[-1].stop_token_id == 66
            assert outputs[-1].WhichOneof("stop_reason") == "stop_token_id"


async def test_facts_of_the_prompt_are_told_although_the_worker_was_cut_short(
    harness: MakeHarness,
) -> None:
    async def script(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
        yield DispatchedEvent(prefill_worker_id="p0")
        yield TokensEvent(index=0, token_ids=[65], offsets=[0.0], cached_tokens=7)
        yield tokens(1, 66)
        yield tokens(2, 67)

    async with harness(prefill=1) as h:
        h.decodes[0].script = script
        outputs = await h.outputs(token_ids=list(range(100)), stop=["B"])
        last = outputs[-1]
        assert (last.usage.cached_tokens, last.placement.kind) == (7, "split")
        assert last.placement.prefill_worker_id == "p0"
