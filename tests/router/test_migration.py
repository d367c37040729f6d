"""A decode worker that is lost is replaced: the stream goes on, nothing twice, nothing missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from router.config import RouterConfig
from router.process import Router
from router.served_model import ServedModel
from tasuki.errors import QueueFullError, UnavailableError
from tasuki.messages import DecodeRequest, TokensEvent
from tasuki.server.grpc_server import internal_channel
from tasuki.v1 import inference_pb2, inference_pb2_grpc
from tasuki.wire.decode import WireDecodeEvent
from tests.router.conftest import Harness, MakeHarness
from tests.router.fake_worker import Script, finished, place_event, spell, wait_until

PROMPT = list(range(100))
ALPHABET = list(range(65, 91))


def until_token(count: int, *, then: Exception | None = None) -> Script:
    """Spells so many tokens, and then nothing more, or an error."""

    async def script(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
        given = 0
        async for event in spell(request):
            given += isinstance(event, TokensEvent)
            if given > count:
                break
            yield event
        if then is not None:
            raise then
        await asyncio.Event().wait()

    return script


async def rest(call: Any) -> list[inference_pb2.GenerateResponse]:
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


def token_ids(messages: list[inference_pb2.GenerateResponse], sample: int = 0) -> list[int]:
    """Of one sample; checks that indices go on without a gap or a repetition."""
    found: list[int] = []
    for message in messages:
        if message.sample_index == sample:
            assert message.index == len(found)
            found += message.token_ids
    return found


@pytest.mark.parametrize("count", [0, 1, 5])
async def test_a_worker_that_dies_is_replaced(harness: MakeHarness, count: int) -> None:
    async with harness(prefill=1, decode=2) as h:
        dying, other = h.decodes
        dying.script = until_token(count)
        call = h.generate(token_ids=PROMPT, max_tokens=9, seed=7)
        first = [await call.read() for _ in range(count)]
        await wait_until(lambda: dying.running == 1, "it is there")
        await dying.stop()
        messages = first + await rest(call)
        assert token_ids(messages) == ALPHABET[:9]
        assert "".join(message.text for message in messages) == "ABCDEFGHI"
        assert messages[-1].placement.decode_worker_id == "d1"
        (asked,) = other.decodes
        assert asked.output_token_ids == ALPHABET[:count]
        assert asked.prompt_token_ids == PROMPT
        assert asked.sampling.seed == 7
        # what has no output yet is prefilled elsewhere as before; the rest is computed where it is
        assert bool(asked.prefill_candidates) == (count == 0)
        assert (asked.local_reason == "migrated") == (count > 0)
        assert h.metric("migrations_total", reason="decode_died") == 1
        assert h.metric("requests_total", outcome="completed") == 1


async def test_the_only_worker_is_waited_for(harness: MakeHarness) -> None:
    async with harness() as h:
        (worker,) = h.decodes
        port = int(worker.address.rpartition(":")[2])
        worker.script = until_token(2)
        call = h.generate(token_ids=PROMPT, max_tokens=5)
        first = [await call.read(), await call.read()]
        await worker.stop()
        worker.script = spell
        await wait_until(lambda: len(h.router.placer.queue) == 1, "it waits")
        await worker.start(port)
        assert token_ids(first + await rest(call)) == ALPHABET[:5]


async def test_nobody_comes_back(harness: MakeHarness) -> None:
    async with harness(queue_timeout=0.3) as h:
        h.decodes[0].script = until_token(2)
        call = h.generate(token_ids=PROMPT, max_tokens=5)
        first = [await call.read(), await call.read()]
        assert token_ids(first) == ALPHABET[:2]
        await h.decodes[0].stop()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "take the request over" in (caught.value.details() or "")
        assert h.metric("requests_total", outcome="failed") == 1


async def test_a_request_that_kills_its_workers_is_given_up(harness: MakeHarness) -> None:
    async with harness(decode=3, max_migrations=1) as h:
        for worker in h.decodes:
            worker.script = until_token(0, then=UnavailableError("the engine of dx died"))
        error = await h.error(token_ids=PROMPT, max_tokens=5)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert sum(len(worker.decodes) for worker in h.decodes) == 2
        # one that gets a token from each goes on
        for worker in h.decodes:
            worker.script = until_token(1, then=UnavailableError("the engine of dx died"))
        reporting = asyncio.ensure_future(keep_reporting(h))
        try:
            assert token_ids(await h.outputs(token_ids=PROMPT, max_tokens=5)) == ALPHABET[:5]
        finally:
            reporting.cancel()


async def keep_reporting(h: Harness) -> None:
    while True:
        for worker in h.decodes:
            await worker.report()
        await asyncio.sleep(0.05)


async def test_a_worker_that_drains_hands_over(harness: MakeHarness) -> None:
    async with harness(decode=2) as h:
        h.decodes[0].script = until_token(
            3, then=UnavailableError("worker d0 is draining", reason="draining")
        )
        messages = await h.outputs(token_ids=PROMPT, max_tokens=6)
        assert token_ids(messages) == ALPHABET[:6]
        assert h.metric("migrations_total", reason="draining") == 1


async def test_a_worker_that_falls_silent_is_replaced(harness: MakeHarness) -> None:
    async with harness(decode=2, report_timeout=0.4) as h:
        h.decodes[0].script = until_token(2)
        reporting = asyncio.ensure_future(keep_reporting(h))
        call = h.generate(token_ids=PROMPT, max_tokens=4)
        messages = [await call.read(), await call.read()]
        h.decodes[0].silent = True
        messages += await rest(call)
        reporting.cancel()
        assert token_ids(messages) == ALPHABET[:4]
        assert h.metric("migrations_total", reason="stalled") == 1
        await wait_until(lambda: h.decodes[0].cancelled == 1, "the silent one is told to stop")


async def test_samples_go_on_one_by_one(harness: MakeHarness) -> None:
    async def ends_one(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
        async for event in until_token(6)(request):
            yield event
            if isinstance(event, TokensEvent) and (event.index, event.sample_index) == (1, 2):
                yield finished(request, 2, sample_index=2, samples_left=2)
                await asyncio.Event().wait()

    async with harness(decode=2) as h:
        dying, other = h.decodes
        dying.script = ends_one
        call = h.generate(token_ids=PROMPT, max_tokens=5, n=3, temperature=1.0)
        messages = [await call.read() for _ in range(7)]
        await dying.stop()
        messages += await rest(call)
        assert token_ids(messages, 0) == ALPHABET[:5]
        assert token_ids(messages, 1) == ALPHABET[1:6]
        assert token_ids(messages, 2) == ALPHABET[2:4]
        assert sorted(asked.sample_index for asked in other.decodes) == [0, 1]
        assert {asked.sampling.n for asked in other.decodes} == {1}
        assert [m.HasField("timings") for m in messages] == [False] * (len(messages) - 1) + [True]


def outputs(*ids: int, sample: int = 0, ended: bool = False) -> inference_pb2.SampleOutput:
    return inference_pb2.SampleOutput(sample_index=sample, token_ids=ids, ended=ended)


async def test_a_request_that_another_router_began_goes_on(harness: MakeHarness) -> None:
    async with harness(prefill=1) as h:
        messages = await h.resume([outputs(65, 66, 67)], token_ids=PROMPT, max_tokens=5)
        assert [message.index for message in messages] == [3, 4, 5]
        assert "".join(message.text for message in messages) == "DE"
        assert messages[-1].usage.completion_tokens == 5
        assert h.decodes[0].decodes[0].output_token_ids == [65, 66, 67]


async def test_a_stop_string_that_was_complete_ends_at_once(harness: MakeHarness) -> None:
    async with harness() as h:
        (last,) = await h.resume([outputs(65, 66, 67)], token_ids=PROMPT, stop=["BC"])
        assert (last.stop_string, last.usage.completion_tokens, last.index) == ("BC", 3, 3)
        assert not h.decodes[0].decodes


async def test_ended_samples_stay_ended(harness: MakeHarness) -> None:
    async with harness() as h:
        has = [outputs(65, 66, sample=0, ended=True), outputs(66, sample=1)]
        messages = await h.resume(has, token_ids=PROMPT, max_tokens=3, n=2, temperature=1.0)
        assert {message.sample_index for message in messages} == {1}
        assert [list(message.token_ids) for message in messages] == [[67], [68], []]


@pytest.mark.parametrize(
    ("has", "words"),
    [
        ([outputs(65, sample=1)], "name sample 1, of 1"),
        ([outputs(65), outputs(65)], "at most once"),
        ([outputs(65, 66, 67, 68)], "at most max_tokens, 3"),
        ([outputs(65, 1000)], "ids below 300"),
        ([outputs(65, ended=True)], "nothing is left to do"),
    ],
)
async def test_what_cannot_have_been_answered_is_refused(
    harness: MakeHarness, has: list[inference_pb2.SampleOutput], words: str
) -> None:
    async with harness() as h:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await h.resume(has, token_ids=PROMPT, max_tokens=3)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in (caught.value.details() or "")


async def test_a_full_worker_refuses_one_sample_while_another_goes_on(harness: MakeHarness) -> None:
    refusing, told = asyncio.Event(), asyncio.Event()

    async def full(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
        refusing.set()
        await told.wait()
        raise QueueFullError("enough wait here")
        yield place_event(request)

    async def slow(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
        await refusing.wait()
        async for event in spell(request):
            yield event

    async with harness(decode=2) as h:
        h.decodes[0].script, h.decodes[1].script = slow, full
        has = [outputs(65, sample=0), outputs(66, sample=1)]
        call = h.generate(outputs=has, token_ids=PROMPT, max_tokens=3, n=2, temperature=1.0)
        messages = [await call.read()]
        h.decodes[1].script = spell
        told.set()
        messages += await rest(call)
        assert sorted(messages[0].token_ids) in ([66], [67])
        for sample in (0, 1):
            ids = [i for m in messages if m.sample_index == sample for i in m.token_ids]
            assert ids == [66 + sample, 67 + sample]


async def test_what_fits_is_known_before_a_request_goes_on(
    harness: MakeHarness, model: ServedModel
) -> None:
    """A router that has just begun has heard of no worker; the one before it had."""
    async with harness() as h:
        (worker,) = h.decodes
        await worker.report(total_blocks=126, free_blocks=126)
        worker.silent = True
        router = Router(RouterConfig(decode_workers=worker.address), model)
        await router.start()
        channel = internal_channel(router.grpc.address)
        try:
            request = inference_pb2.GenerateRequest(outputs=[outputs(65, 66)])
            request.token_ids.ids.extend([1] * 2000)
            call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=10)
            await call.initial_metadata()
            worker.silent = False
            await worker.report()
            messages = await rest(call)
            assert [i for m in messages for i in m.token_ids] == ALPHABET[2:16]
        finally:
            await channel.close()
            await router.stop(grace=0.0)
