"""Prefill calls between two servers with two fake engines, over real gRPC."""

from __future__ import annotations

from tasuki.messages import (
    AcceptedEvent,
    CallPrefill,
    CancelPrefillCall,
    CancelStream,
    ErrorStatus,
    FailedEvent,
    FinishReason,
    FirstTokenEvent,
    PrefillCallEnded,
    PrefillDoneEvent,
    PrefillReply,
    PrefillRequest,
    PrefillTarget,
    Role,
    StartPrefill,
)
from tests.server.fake_engine import GREEDY
from tests.server.running_worker import RunningWorker, running
from tests.waiting import until

FIRST = FirstTokenEvent(token_ids=[42], cached_tokens=0, queue_seconds=0.0, compute_seconds=0.1)
NOWHERE = PrefillTarget(worker_id="gone", worker_epoch=1, address="127.0.0.1:1")


def call_to(target: PrefillTarget, number: int, *, timeout: float | None = None) -> CallPrefill:
    request = PrefillRequest(
        request_id=f"r{number}",
        handoff_id=f"{number:032x}",
        link_id="b" * 32,
        prefill_epoch=target.worker_epoch,
        decode_worker_id="d",
        decode_epoch=2,
        prompt_token_ids=[1, 2, 3],
        first_block=1,
        sampling=GREEDY,
        timeout=timeout,
    )
    return CallPrefill(target=target, request=request)


async def ended(worker: RunningWorker, count: int = 1) -> PrefillCallEnded:
    return await worker.engine.wait_for(PrefillCallEnded, count)


async def test_replies_fan_out_by_handoff() -> None:
    async with running(Role.PREFILL, epoch=1) as prefill, running(Role.DECODE) as decode:
        for number in (1, 2):
            decode.engine.say(call_to(prefill.target, number))
        await prefill.engine.wait_for(StartPrefill, 2)
        starts = {s.request.handoff_id: s for s in prefill.engine.all(StartPrefill)}
        assert starts[f"{1:032x}"].request == call_to(prefill.target, 1).request
        assert len(decode.server.channels) == 1  # one connection for both
        for number in (2, 1):
            stream_id = starts[f"{number:032x}"].stream_id
            prefill.engine.emit(stream_id, AcceptedEvent(queued_tokens=number))
            prefill.engine.emit(stream_id, FIRST, PrefillDoneEvent())
        await ended(decode, 2)
        for number in (1, 2):
            handoff_id = f"{number:032x}"
            replies = [m for m in decode.engine.all(PrefillReply) if m.handoff_id == handoff_id]
            assert [m.event for m in replies] == [AcceptedEvent(queued_tokens=number), FIRST]
        assert all(m.error is None for m in decode.engine.all(PrefillCallEnded))


async def test_a_refusal_comes_back_typed() -> None:
    async with running(Role.PREFILL, epoch=1) as prefill, running(Role.DECODE) as decode:
        decode.engine.say(call_to(prefill.target, 1))
        start = await prefill.engine.wait_for(StartPrefill)
        full = ErrorStatus(code="RESOURCE_EXHAUSTED", reason="queue_full", message="full here")
        prefill.engine.emit(start.stream_id, FailedEvent(error=full))
        assert (await ended(decode)).error == full


async def test_cancelling_the_call_stops_the_work() -> None:
    async with running(Role.PREFILL, epoch=1) as prefill, running(Role.DECODE) as decode:
        decode.engine.say(call_to(prefill.target, 1))
        start = await prefill.engine.wait_for(StartPrefill)
        decode.engine.say(CancelPrefillCall(handoff_id=f"{1:032x}"))
        cancel = await prefill.engine.wait_for(CancelStream)
        assert cancel.stream_id == start.stream_id
        error = (await ended(decode)).error
        assert error is not None
        assert error.reason == "cancelled"
        decode.engine.say(CancelPrefillCall(handoff_id="9" * 32))  # unknown: ignored


async def test_a_call_cancelled_in_the_same_breath_still_ends_once() -> None:
    async with running(Role.PREFILL, epoch=1) as prefill, running(Role.DECODE) as decode:
        decode.engine.say(call_to(prefill.target, 1))
        decode.engine.say(CancelPrefillCall(handoff_id=f"{1:032x}"))
        await ended(decode)
        await until(lambda: not len(decode.server.calls), "the call is returned")
        assert len(decode.engine.all(PrefillCallEnded)) == 1


async def test_a_deadline_travels_along() -> None:
    async with running(Role.PREFILL, epoch=1) as prefill, running(Role.DECODE) as decode:
        decode.engine.say(call_to(prefill.target, 1, timeout=0.2))
        start = await prefill.engine.wait_for(StartPrefill)
        assert start.request.timeout is not None
        assert start.request.timeout <= 0.2
        error = (await ended(decode)).error
        assert error is not None
        assert error.reason == "deadline"
        assert (await prefill.engine.wait_for(CancelStream)).reason is FinishReason.DEADLINE


async def test_nobody_there() -> None:
    async with running(Role.DECODE) as decode:
        decode.engine.say(call_to(NOWHERE, 1))
        error = (await ended(decode)).error
        assert error is not None
        assert error.code == "UNAVAILABLE"


async def test_a_dead_prefill_engine_ends_the_call_at_once() -> None:
    async with running(Role.PREFILL, epoch=1) as prefill, running(Role.DECODE) as decode:
        decode.engine.say(call_to(prefill.target, 1))
        await prefill.engine.wait_for(StartPrefill)
        prefill.engine.die()
        error = (await ended(decode)).error
        assert error is not None
        assert error.reason == "engine_died"


async def test_a_dead_decode_engine_cancels_its_calls() -> None:
    async with running(Role.PREFILL, epoch=1) as prefill, running(Role.DECODE) as decode:
        decode.engine.say(call_to(prefill.target, 1))
        await prefill.engine.wait_for(StartPrefill)
        decode.engine.die()
        await prefill.engine.wait_for(CancelStream)
