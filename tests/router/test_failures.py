"""What goes wrong around a request: cancels, deadlines, full queues, refusals, deaths."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from tasuki.errors import NoKVError, UnavailableError
from tasuki.messages import DecodeRequest, FinishReason
from tasuki.v1 import inference_pb2
from tasuki.wire.decode import WireDecodeEvent
from tests.router.conftest import MakeHarness
from tests.router.fake_worker import finished, place_event, spell, tokens, wait_until

PROMPT = list(range(100))


async def endless(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
    """One token, and then nothing until somebody ends it."""
    yield place_event(request)
    yield tokens(0, 65)
    await asyncio.Event().wait()


async def silent(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
    await asyncio.Event().wait()
    yield place_event(request)


async def no_kv(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
    if request:
        raise NoKVError("no blocks became free within 2 s")
    yield place_event(request)


def reason_of(error: grpc.aio.AioRpcError) -> Any:
    return (error.trailing_metadata() or {}).get("tasuki-reason")


# --- the caller goes away ---------------------------------------------------------------------


async def test_a_cancel_reaches_the_worker_at_once(harness: MakeHarness) -> None:
    async with harness() as h:
        h.decodes[0].script = endless
        call = h.generate(text="x", max_tokens=9)
        await call.read()
        call.cancel()
        await wait_until(lambda: h.decodes[0].cancelled == 1, "the worker is told", 1.0)
        await wait_until(lambda: h.total("requests_total") == 1, "it is counted")
        assert h.metric("requests_total", outcome="cancelled") == 1
        assert h.total("slo_requests_total") == 0  # a client's own cancel is reported apart


async def test_a_client_that_disappears_stops_the_work(harness: MakeHarness) -> None:
    async with harness() as h:
        h.decodes[0].script = endless
        channel = grpc.aio.insecure_channel(h.router.grpc.address)
        stub = type(h.stub)(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(text="x"))
        await call.read()
        await channel.close()
        await wait_until(lambda: h.decodes[0].running == 0, "the worker is told", 1.0)
        await wait_until(
            lambda: h.metric("requests_total", outcome="cancelled") == 1, "counted", 2.0
        )


async def test_a_cancel_in_the_queue_leaves_it(harness: MakeHarness) -> None:
    async with harness() as h:
        await h.decodes[0].report(free_blocks=0)
        await wait_until(lambda: h.router.registry.snapshots()[0].free_blocks == 0, "report")
        call = h.generate(text="x")
        await wait_until(lambda: len(h.router.placer.queue) == 1, "it waits")
        assert h.metric("admission_queue_requests") == 1
        assert h.metric("oldest_waiting_seconds") >= 0
        call.cancel()
        await wait_until(lambda: len(h.router.placer.queue) == 0, "it left")
        await wait_until(lambda: h.total("requests_total") == 1, "it is counted")
        assert h.metric("requests_total", outcome="cancelled") == 1
        assert not h.decodes[0].decodes


async def test_the_deadline_of_the_caller_passes_on_the_worker(harness: MakeHarness) -> None:
    async with harness() as h:
        h.decodes[0].script = silent
        error = await h.error(text="x", timeout=0.2)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await wait_until(lambda: h.decodes[0].running == 0, "the worker is told", 2.0)
        # the caller's own timer may ring before the router has counted
        await wait_until(lambda: h.metric("requests_total", outcome="failed") == 1, "counted", 2.0)
        assert h.metric("slo_requests_total", result="failed", setup="colocated") == 1
        assert 0 < (h.decodes[0].decodes[0].timeout or 0) <= 0.25  # gRPC rounds up


async def test_the_routers_own_deadline_ends_a_request_in_words(harness: MakeHarness) -> None:
    async def late(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
        yield place_event(request)
        yield tokens(0, 65)
        yield finished(request, 1, FinishReason.DEADLINE)

    async with harness(request_timeout=0.2, max_request_timeout=0.2) as h:
        h.decodes[0].script = late
        last = (await h.outputs(text="x", max_tokens=5, timeout=None))[-1]
        assert last.timings.slo_result == "failed"
        h.decodes[0].script = silent  # a worker that ignores the deadline
        error = await h.error(text="x", timeout=None)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert reason_of(error) == "deadline"
        assert h.metric("requests_total", outcome="failed") == 2


# --- no room ------------------------------------------------------------------------------------


async def test_queue_full_and_deadline_in_the_queue(harness: MakeHarness) -> None:
    async with harness(max_queue=1, queue_timeout=0.3) as h:
        await h.decodes[0].report(free_blocks=0)
        await wait_until(lambda: h.router.registry.snapshots()[0].free_blocks == 0, "report")
        first = asyncio.create_task(h.error(text="x"))
        await wait_until(lambda: len(h.router.placer.queue) == 1, "it waits")
        full = await h.error(text="x")
        assert (full.code(), reason_of(full)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue_full")
        waited = await first
        assert (waited.code(), reason_of(waited)) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED, "no_kv",
        )  # fmt: skip
        assert "--queue-timeout" in (waited.details() or "")
        own = await h.error(text="x", timeout=0.1)
        assert own.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await wait_until(lambda: h.total("requests_total") == 3, "all are counted")
        for reason in ("queue_full", "no_kv", "deadline"):
            assert h.metric("rejections_total", reason=reason) == 1
        assert h.metric("requests_total", outcome="rejected") == 3


async def test_a_request_waits_for_room_and_then_runs(harness: MakeHarness) -> None:
    async with harness() as h:
        await h.decodes[0].report(free_blocks=0)
        await wait_until(lambda: h.router.registry.snapshots()[0].free_blocks == 0, "report")
        waiting = asyncio.create_task(h.outputs(token_ids=PROMPT, max_tokens=2))
        await wait_until(lambda: len(h.router.placer.queue) == 1, "it waits")
        await h.decodes[0].report(free_blocks=7)
        outputs = await waiting
        assert outputs[-1].usage.completion_tokens == 2
        assert outputs[-1].timings.queue > 0


async def test_own_placements_hold_back_the_next_one(harness: MakeHarness) -> None:
    async with harness() as h:
        release = asyncio.Event()

        async def slow(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
            yield place_event(request)
            await release.wait()
            yield tokens(0, 65)
            yield finished(request, 1)

        h.decodes[0].script = slow
        await h.decodes[0].report(free_blocks=10)
        await wait_until(lambda: h.router.registry.snapshots()[0].free_blocks == 10, "report")
        first = asyncio.create_task(h.outputs(token_ids=PROMPT, max_tokens=1))  # 7 blocks
        await wait_until(lambda: len(h.decodes[0].decodes) == 1, "the first is placed")
        second = asyncio.create_task(h.outputs(token_ids=PROMPT, max_tokens=1))
        await wait_until(lambda: len(h.router.placer.queue) == 1, "the second waits")
        assert h.router.registry.snapshots()[0].unclaimed_blocks == 3
        release.set()
        await asyncio.gather(first, second)


async def test_no_kv_before_any_token_goes_to_another_worker(harness: MakeHarness) -> None:
    async with harness(decode=2) as h:
        refusing = h.decodes[0]
        refusing.script = no_kv  # d0 is chosen first: equal load, first by name
        outputs = await h.outputs(token_ids=PROMPT, max_tokens=3)
        assert outputs[-1].placement.decode_worker_id == "d1"
        assert [o.index for o in outputs] == [0, 1, 2, 3]
        assert len(refusing.decodes) == 1
        assert h.total("requests_total") == h.metric("requests_total", outcome="completed") == 1
        assert h.total("placements_total") == 1
        assert h.total("rejections_total") == 0


async def test_no_kv_from_the_only_worker_waits_for_its_next_report(harness: MakeHarness) -> None:
    async with harness() as h:
        worker = h.decodes[0]
        worker.script = no_kv
        waiting = asyncio.create_task(h.outputs(token_ids=PROMPT, max_tokens=1))
        await wait_until(lambda: len(h.router.placer.queue) == 1, "it is back in the queue")
        assert len(worker.decodes) == 1  # not asked again before it reports
        worker.script = spell
        await worker.report()
        assert (await waiting)[-1].usage.completion_tokens == 1


async def test_no_kv_for_ever_is_a_rejection(harness: MakeHarness) -> None:
    async with harness(queue_timeout=0.2) as h:
        h.decodes[0].script = no_kv
        error = await h.error(token_ids=PROMPT, max_tokens=1)
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "no_kv")
        assert h.metric("rejections_total", reason="no_kv") == 1
        assert h.metric("requests_total", outcome="rejected") == 1


# --- workers go away ------------------------------------------------------------------------------


async def test_an_engine_that_died_says_so(harness: MakeHarness) -> None:
    async def dying(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
        yield place_event(request)
        yield tokens(0, 65)
        raise UnavailableError("the engine process ended", reason="engine_died")

    async with harness(max_migrations=0) as h:
        h.decodes[0].script = dying
        error = await h.error(text="x", max_tokens=4)
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "engine_died")


async def test_no_worker_and_draining_are_refused_at_once(harness: MakeHarness) -> None:
    async with harness() as h:
        await h.decodes[0].report(draining=True)
        await wait_until(lambda: h.router.why_not_ready() is not None, "not ready")
        assert not h.router.grpc.health.serving
        leaving = await h.error(text="x")
        assert (leaving.code(), reason_of(leaving)) == (grpc.StatusCode.UNAVAILABLE, "draining")
        await h.decodes[0].report(draining=False, ready=False)
        await wait_until(
            lambda: h.metric("workers", role="decode", state="connecting") == 1, "seen"
        )
        none = await h.error(text="x")
        assert (none.code(), reason_of(none)) == (grpc.StatusCode.UNAVAILABLE, "no_worker")
        await h.decodes[0].report(ready=True)
        await wait_until(lambda: h.router.grpc.health.serving, "ready again")
        h.router.service.drain()
        own = await h.error(text="x")
        assert reason_of(own) == "draining"
        assert h.total("rejections_total") == 3


async def test_stopping_lets_running_requests_finish(harness: MakeHarness) -> None:
    release = asyncio.Event()

    async def slow(request: DecodeRequest) -> AsyncIterator[WireDecodeEvent]:
        yield place_event(request)
        yield tokens(0, 65)
        await release.wait()
        yield finished(request, 1)

    async with harness() as h:
        h.decodes[0].script = slow
        call = h.generate(text="x", max_tokens=1)
        await call.read()
        stopping = asyncio.create_task(h.router.stop(grace=10.0))
        await wait_until(lambda: h.router.service.draining, "draining")
        release.set()
        assert (await call.read()).usage.completion_tokens == 1
        await stopping
