"""A worker's server process over real gRPC on loopback, with a scripted engine behind it."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import grpc
import pytest

from tasuki.config import WorkerConfig
from tasuki.errors import ConfigError
from tasuki.messages import (
    AcceptedEvent,
    BeginDrain,
    CancelStream,
    CaptureProfile,
    DispatchedEvent,
    ErrorStatus,
    FailedEvent,
    FaultInjected,
    FinishReason,
    FirstTokenEvent,
    FromEngine,
    InjectFault,
    MetricSample,
    MetricSamples,
    PrefillDoneEvent,
    PrefillRequest,
    PrefixCacheReset,
    ProfileCaptured,
    ResetPrefixCache,
    Role,
    StartDecode,
    StartPrefill,
    ToEngine,
)
from tasuki.server.status import error_from_rpc
from tasuki.server.worker_server import WorkerServer
from tasuki.v1 import common_pb2, worker_pb2
from tasuki.wire.prefill import prefill_request_to_proto
from tests.server.fake_engine import GREEDY, FakeEngine, finished, tokens
from tests.server.running_worker import decode_request, rpc_error, running
from tests.server.test_http_page import get
from tests.waiting import until


async def test_a_worker_that_listens_everywhere_has_a_name_of_its_own() -> None:
    """Links are replaced by the name of their worker, so no two may share one."""
    async with running(Role.DECODE, host="0.0.0.0") as worker:
        host, _, port = worker.server.state.worker_id.rpartition(":")
        assert host == socket.gethostname()
        assert port == worker.server.state.address.rpartition(":")[2]


def prefill_request() -> worker_pb2.PrefillRequest:
    return prefill_request_to_proto(
        PrefillRequest(
            request_id="r1",
            handoff_id="a" * 32,
            link_id="b" * 32,
            prefill_epoch=0xABC,
            decode_worker_id="d",
            decode_epoch=5,
            prompt_token_ids=[1, 2],
            first_block=0,
            sampling=GREEDY,
        )
    )


async def read(call: Any) -> Any:
    async with asyncio.timeout(10):
        return await call.read()


async def test_tokens_stream_through() -> None:
    async with running(Role.DECODE) as worker:
        call = worker.stub.Decode(decode_request())
        start = await worker.engine.wait_for(StartDecode)
        assert start.request.prompt_token_ids == [1, 2]
        assert start.request.timeout is None
        worker.engine.emit(start.stream_id, DispatchedEvent(prefill_worker_id="p1"))
        assert (await read(call)).dispatched.prefill_worker_id == "p1"
        worker.engine.emit(start.stream_id, tokens(0, 11), tokens(1, 12), finished())
        first = await read(call)
        assert (first.tokens.index, list(first.tokens.token_ids)) == (0, [11, 12])  # merged
        assert list(first.tokens.offsets) == [0.5, 0.5]
        assert (await read(call)).finished.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert await read(call) is grpc.aio.EOF
        await until(lambda: not len(worker.server.streams), "the stream is returned")
        assert worker.engine.all(CancelStream) == []


async def test_one_frame_serves_many_streams() -> None:
    async with running(Role.DECODE) as worker:
        calls = [worker.stub.Decode(decode_request("same")) for _ in range(8)]
        await worker.engine.wait_for(StartDecode, 8)
        ids = [start.stream_id for start in worker.engine.all(StartDecode)]
        assert len(set(ids)) == 8  # a request id seen twice is legal
        for stream_id in ids:
            worker.engine.emit(stream_id, tokens(0, stream_id), finished(1))
        seen = [(await read(call)).tokens.token_ids[0] for call in calls]
        assert sorted(seen) == sorted(ids)
        for call in calls:
            assert (await read(call)).HasField("finished")


async def test_a_cancel_reaches_the_engine_at_once() -> None:
    async with running(Role.DECODE) as worker:
        call = worker.stub.Decode(decode_request())
        start = await worker.engine.wait_for(StartDecode)
        call.cancel()
        cancel = await worker.engine.wait_for(CancelStream)
        assert cancel == CancelStream(stream_id=start.stream_id, reason=FinishReason.CANCELLED)
        worker.engine.emit(start.stream_id, tokens(0, 1))  # late: dropped


async def test_a_deadline_reaches_the_engine_as_one() -> None:
    async with running(Role.DECODE) as worker:
        call = worker.stub.Decode(decode_request(timeout=60), timeout=0.2)
        start = await worker.engine.wait_for(StartDecode)
        assert start.request.timeout is not None
        assert 0 < start.request.timeout <= 0.25  # gRPC rounds up
        assert (await rpc_error(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await worker.engine.wait_for(CancelStream)).reason is FinishReason.DEADLINE


async def test_a_failure_is_the_streams_status() -> None:
    async with running(Role.DECODE) as worker:
        call = worker.stub.Decode(decode_request())
        start = await worker.engine.wait_for(StartDecode)
        status = ErrorStatus(code="RESOURCE_EXHAUSTED", reason="no_kv", message="no blocks")
        worker.engine.emit(start.stream_id, FailedEvent(error=status))
        error = error_from_rpc(await rpc_error(call))
        assert (error.code.value, error.reason, error.message) == (
            "RESOURCE_EXHAUSTED",
            "no_kv",
            "no blocks",
        )
        assert worker.engine.all(CancelStream) == []


async def test_a_prefill_stream_ends_well() -> None:
    async with running(Role.PREFILL) as worker:
        call = worker.stub.Prefill(prefill_request())
        start = await worker.engine.wait_for(StartPrefill)
        assert start.request.prefill_epoch == 0xABC  # the engine checks it, not the server
        worker.engine.emit(start.stream_id, AcceptedEvent(queued_tokens=9))
        first = FirstTokenEvent(
            token_ids=[5], cached_tokens=0, queue_seconds=0.1, compute_seconds=0.2
        )
        worker.engine.emit(start.stream_id, first, PrefillDoneEvent())
        assert (await read(call)).accepted.queued_tokens == 9
        assert (await read(call)).first_token.token_ids == [5]
        assert await read(call) is grpc.aio.EOF


async def test_malformed_requests_never_reach_the_engine() -> None:
    async with running(Role.DECODE) as worker:
        request = decode_request()
        request.sampling.temperature = float("nan")
        error = await rpc_error(worker.stub.Decode(request))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "temperature" in str(error.details())
        assert worker.engine.heard == []


@pytest.mark.parametrize(("role", "method"), [(Role.PREFILL, "Decode"), (Role.DECODE, "Prefill")])
async def test_the_other_roles_calls_are_refused(role: Role, method: str) -> None:
    request = decode_request() if method == "Decode" else prefill_request()
    async with running(role) as worker:
        error = await rpc_error(getattr(worker.stub, method)(request))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert error_from_rpc(error).reason == "wrong_role"
        assert role.value in str(error.details())


async def test_engine_death_ends_streams_at_once_and_the_worker_is_not_ready() -> None:
    async with running(Role.DECODE) as worker:
        calls = [worker.stub.Decode(decode_request()) for _ in range(3)]
        await worker.engine.wait_for(StartDecode, 3)
        first = worker.engine.all(StartDecode)[0].stream_id
        assert await worker.serving()
        worker.engine.emit(first, tokens(0, 1))
        began = time.monotonic()
        worker.engine.die("out of memory")
        errors = [error_from_rpc(await rpc_error(call)) for call in calls]
        assert time.monotonic() - began < 2
        assert {(error.code.value, error.reason) for error in errors} == {
            ("UNAVAILABLE", "engine_died")
        }
        assert "out of memory" in errors[0].message
        assert not await worker.serving()
        assert not await worker.serving("tasuki.v1.Worker")
        assert worker.server.ended.is_set()
        status, _, body = await get(worker.server.page.address, "/readyz")
        assert (status, "out of memory" in body) == (503, True)
        late = error_from_rpc(await rpc_error(worker.stub.Decode(decode_request())))
        assert late.reason == "engine_died"


async def test_tokens_given_before_the_death_still_arrive() -> None:
    async with running(Role.DECODE) as worker:
        call = worker.stub.Decode(decode_request())
        start = await worker.engine.wait_for(StartDecode)
        worker.engine.emit(start.stream_id, tokens(0, 1, 2))
        worker.engine.die()
        assert list((await read(call)).tokens.token_ids) == [1, 2]
        with pytest.raises(grpc.aio.AioRpcError):
            await read(call)


async def test_while_the_engine_starts_health_answers_and_work_is_refused() -> None:
    async with running(Role.DECODE, started=False) as worker:
        worker.engine.may_start.clear()
        starting = asyncio.create_task(worker.server.start())
        await until(lambda: worker.server.page.address, "the page listens")
        assert not await worker.serving()
        error = error_from_rpc(await rpc_error(worker.stub.Decode(decode_request())))
        assert (error.code.value, "starting" in error.message) == ("UNAVAILABLE", True)
        assert (await get(worker.server.page.address, "/healthz"))[0] == 200
        assert (await get(worker.server.page.address, "/readyz"))[0] == 503
        worker.engine.may_start.set()
        await starting
        assert await worker.serving()
        assert (await get(worker.server.page.address, "/readyz"))[0] == 200


async def test_drain_refuses_new_work_and_finishes_the_old() -> None:
    async with running(Role.DECODE) as worker:
        call = worker.stub.Decode(decode_request())
        start = await worker.engine.wait_for(StartDecode)
        await worker.stub.Drain(worker_pb2.DrainRequest(), timeout=5)
        await worker.engine.wait_for(BeginDrain)
        error = error_from_rpc(await rpc_error(worker.stub.Decode(decode_request())))
        assert (error.code.value, error.reason) == ("UNAVAILABLE", "draining")
        assert not await worker.serving()
        drained = asyncio.create_task(worker.server.drain(10))
        await asyncio.sleep(0)
        assert not drained.done()
        worker.engine.emit(start.stream_id, tokens(0, 1), finished(1))
        assert (await read(call)).HasField("tokens")
        assert (await read(call)).HasField("finished")
        await asyncio.wait_for(drained, 5)
        assert len(worker.engine.all(BeginDrain)) == 1


async def test_a_drain_has_a_deadline_and_close_tells_who_is_left() -> None:
    async with running(Role.DECODE) as worker:
        call = worker.stub.Decode(decode_request())
        await worker.engine.wait_for(StartDecode)
        await worker.server.drain(0.01)
        closing = asyncio.create_task(worker.server.close())
        error = error_from_rpc(await rpc_error(call))
        assert (error.code.value, error.reason) == ("UNAVAILABLE", "draining")
        await closing


async def test_the_name_is_the_address_unless_given() -> None:
    async with running(Role.DECODE) as worker:
        address = worker.server.state.address
        assert address.startswith("127.0.0.1:")
        assert worker.engine.config.worker_id == address
        assert worker.engine.config.port == int(address.rsplit(":", 1)[1]) > 0
        info = await worker.describe.GetServerInfo(common_pb2.GetServerInfoRequest(), timeout=5)
        assert (info.worker_id, info.role) == (address, common_pb2.ROLE_DECODE)
        assert info.worker_epoch == 0xABC
        assert info.facts["linears"] == "fake"
        assert info.config["model"] == "tiny"
        assert info.metrics_address == worker.server.page.address


async def test_a_port_in_use_is_named_before_the_engine_is_made() -> None:
    async with running(Role.DECODE) as worker:
        port = worker.server.grpc.port
        made: list[FakeEngine] = []

        def make(config: WorkerConfig) -> FakeEngine:
            made.append(FakeEngine(config))
            return made[0]

        with pytest.raises(ConfigError, match=f"port {port}"):
            WorkerServer(Role.DECODE, WorkerConfig(port=port), make)
        assert made == []


async def test_the_engines_metrics_are_on_the_page_and_unknown_ones_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(Role.DECODE) as worker:
        good = MetricSample(name="kv_received_bytes_total", op="inc", value=4096, labels={})
        bad = MetricSample(name="nonsense", op="inc", value=1, labels={})
        worker.engine.say(MetricSamples(samples=[bad, good, bad]))
        read = worker.server.metrics.registry.get_sample_value
        await until(lambda: read("tasuki_kv_received_bytes_total"), "the sample is applied")
        await until(lambda: caplog.text.count("nonsense") == 1, "one word about the other")
        body = (await get(worker.server.page.address, "/metrics"))[2]
        assert "tasuki_kv_received_bytes_total 4096.0" in body
        assert 'linears="fake"' in body


async def test_a_storm_of_vanishing_clients_leaves_nothing() -> None:
    async with running(Role.DECODE) as worker:
        calls = [worker.stub.Decode(decode_request(str(n))) for n in range(40)]
        await worker.engine.wait_for(StartDecode, 40)
        for call in calls:
            call.cancel()
        await worker.engine.wait_for(CancelStream, 40)
        await until(lambda: not len(worker.server.streams), "all streams are returned")
        assert {m.stream_id for m in worker.engine.all(CancelStream)} == {
            m.stream_id for m in worker.engine.all(StartDecode)
        }


async def test_a_reset_of_the_prefix_cache_is_the_engines_answer() -> None:
    async with running(Role.DECODE) as worker:

        def answer(message: ToEngine) -> list[FromEngine]:
            if isinstance(message, ResetPrefixCache):
                return [PrefixCacheReset(command_id=message.command_id, blocks=3)]
            return []

        worker.engine.answer = answer
        request = common_pb2.ResetPrefixCacheRequest()
        assert (await worker.describe.ResetPrefixCache(request, timeout=5)).blocks == 3


async def test_a_profile_is_the_engines_answer_and_bounded() -> None:
    async with running(Role.DECODE) as worker:

        def answer(message: ToEngine) -> list[FromEngine]:
            if isinstance(message, CaptureProfile):
                number = message.command_id
                late = ProfileCaptured(command_id=number + 9, steps=0, table="", trace=b"")
                mine = ProfileCaptured(command_id=number, steps=4, table="mm 90%", trace=b"z")
                return [late, mine]
            return []

        worker.engine.answer = answer
        request = worker_pb2.CaptureProfileRequest(num_steps=4)
        reply = await worker.stub.CaptureProfile(request, timeout=5)
        assert (reply.steps, reply.table, reply.trace) == (4, "mm 90%", b"z")
        for bad in (
            worker_pb2.CaptureProfileRequest(num_steps=0),
            worker_pb2.CaptureProfileRequest(num_steps=257),
            worker_pb2.CaptureProfileRequest(num_steps=1, seconds=float("nan")),
            worker_pb2.CaptureProfileRequest(num_steps=1, seconds=1e9),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await worker.stub.CaptureProfile(bad, timeout=5)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_command_ends_with_the_engine() -> None:
    async with running(Role.DECODE) as worker:
        request = common_pb2.ResetPrefixCacheRequest()
        call = worker.describe.ResetPrefixCache(request, timeout=10)
        await worker.engine.wait_for(ResetPrefixCache)
        worker.engine.die()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_faults_are_for_workers_that_were_started_for_them() -> None:
    async with running(Role.DECODE) as worker:
        engine = worker.engine
        for injected in (False, True):

            def answer(message: ToEngine, injected: bool = injected) -> list[FromEngine]:
                if not isinstance(message, InjectFault):
                    return []
                return [FaultInjected(command_id=message.command_id, injected=injected)]

            engine.answer = answer
            request = worker_pb2.InjectFaultRequest(kind="slow", amount=1000.0)
            if injected:
                await worker.stub.InjectFault(request, timeout=5)
                assert engine.all(InjectFault)[-1].amount == 1000.0
                continue
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await worker.stub.InjectFault(request, timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "--fault-injection" in (caught.value.details() or "")
        for kind, amount in (("burn", 1.0), ("slow", -1.0), ("slow", float("nan"))):
            request = worker_pb2.InjectFaultRequest(kind=kind, amount=amount)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await worker.stub.InjectFault(request, timeout=5)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
