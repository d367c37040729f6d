"""`n` samples at the router: told apart, ended one by one, judged and counted once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec
import pytest

from tasuki.messages import DecodeRequest, FinishReason, TokensEvent
from tasuki.v1 import common_pb2, inference_pb2
from tasuki.wire.decode import WireDecodeEvent
from tests.router.conftest import MakeHarness
from tests.router.fake_worker import Script, finished, place_event, tokens, wait_until

THREE: dict[str, Any] = {"n": 3, "temperature": 1.0}
TEXTS = ("one", "seven", "four")


def of(sample_index: int, event: TokensEvent) -> TokensEvent:
    return msgspec.structs.replace(event, sample_index=sample_index)


def saying(*texts: str, hang: int | None = None) -> Script:
    """A letter of each text in turn; a text that is over ends its sample at once.
    Where the text of sample `hang` is over, nothing more comes.
    """

    async def script(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
        yield place_event(request)
        left = len(texts)
        for index in range(max(map(len, texts))):
            for sample, text in enumerate(texts):
                if index < len(text):
                    yield of(sample, tokens(index, ord(text[index])))
                if index + 1 == len(text):
                    if sample == hang:
                        await asyncio.Event().wait()
                    left -= 1
                    ends: dict[str, Any] = {"sample_index": sample, "samples_left": left}
                    yield finished(request, len(text), **ends)

    return script


def of_sample(
    outputs: list[inference_pb2.GenerateResponse], sample_index: int
) -> list[inference_pb2.GenerateResponse]:
    return [output for output in outputs if output.sample_index == sample_index]


async def test_each_sample_has_its_own_text_index_and_end(harness: MakeHarness) -> None:
    async with harness() as h:
        h.decodes[0].script = saying(*TEXTS)
        outputs = await h.outputs(text="xy", **THREE)
        for sample, text in enumerate(TEXTS):
            mine = of_sample(outputs, sample)
            assert "".join(output.text for output in mine) == text
            assert [output.index for output in mine] == list(range(len(text) + 1))
            ends = [output for output in mine if output.finish_reason]
            assert ends == mine[-1:]
            assert (ends[0].usage.completion_tokens, ends[0].usage.prompt_tokens) == (len(text), 2)
        last = outputs[-1]
        assert last.sample_index == 1
        assert [output for output in outputs if output.HasField("timings")] == [last]
        assert [output for output in outputs if output.HasField("placement")] == [last]
        assert last.timings.slo_result == "met"
        assert h.decodes[0].decodes[0].sampling.n == 3
        assert h.metric("requests_total", outcome="completed") == 1
        assert h.metric("slo_requests_total", result="met", setup="colocated") == 1
        assert h.metric("inter_token_latency_seconds_count") == sum(map(len, TEXTS)) - 3
        assert h.metric("ttft_seconds_count") == 1


async def test_a_stop_string_ends_its_own_sample(harness: MakeHarness) -> None:
    async with harness() as h:
        h.decodes[0].script = saying(*TEXTS, hang=1)
        outputs = await h.outputs(text="x", stop=["ev"], **THREE)
        texts = ["".join(output.text for output in of_sample(outputs, n)) for n in range(3)]
        assert texts == ["one", "s", "four"]
        end = of_sample(outputs, 1)[-1]
        assert (end.stop_string, end.usage.completion_tokens) == ("ev", 3)
        assert outputs[-1].sample_index == 2
        assert outputs[-1].placement.kind == "local"
        await wait_until(lambda: h.decodes[0].cancelled == 1, "nobody wants the rest of `seven`")
        assert h.metric("requests_total", outcome="completed") == 1


async def test_stop_strings_in_all_samples_end_the_work(harness: MakeHarness) -> None:
    async with harness() as h:
        h.decodes[0].script = saying("abcdefgh", "xabcdefgh", "yxabcdefgh", hang=0)
        outputs = await h.outputs(text="x", stop=["bc"], **THREE)
        texts = ["".join(output.text for output in of_sample(outputs, n)) for n in range(3)]
        assert texts == ["a", "xa", "yxa"]
        await wait_until(lambda: h.decodes[0].cancelled == 1, "the worker hears of the end")


async def test_a_deadline_of_one_sample_is_the_requests(harness: MakeHarness) -> None:
    async def script(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
        yield place_event(request)
        for sample in range(2):
            yield of(sample, tokens(0, 65))
        yield finished(request, 1, FinishReason.DEADLINE, sample_index=1, samples_left=1)
        yield finished(request, 1)

    async with harness() as h:
        h.decodes[0].script = script
        outputs = await h.outputs(text="x", n=2, temperature=1.0)
        reasons = [output.finish_reason for output in outputs if output.finish_reason]
        assert reasons == [common_pb2.FINISH_REASON_DEADLINE, common_pb2.FINISH_REASON_LENGTH]
        assert outputs[-1].timings.slo_result == "failed"
        assert h.metric("requests_total", outcome="failed") == 1


@pytest.mark.parametrize(
    "events",
    [
        lambda request: [of(3, tokens(0, 65))],
        lambda request: [of(1, tokens(1, 65))],
        lambda request: [finished(request, 1, sample_index=1)],
        lambda request: [finished(request, 0, sample_index=2), of(2, tokens(0, 65))],
        lambda request: [finished(request, 0, sample_index=2)] * 2,
    ],
    ids=["no such sample", "a gap", "a wrong count", "more after the end", "two ends"],
)
async def test_a_worker_that_breaks_the_rules_is_caught(harness: MakeHarness, events: Any) -> None:
    async def script(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
        yield place_event(request)
        for event in events(request):
            yield event

    async with harness() as h:
        h.decodes[0].script = script
        with pytest.raises(grpc.aio.AioRpcError, match="broke the protocol"):
            await h.outputs(text="x", **THREE)
