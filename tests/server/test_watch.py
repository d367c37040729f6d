"""Watch: reports up to every router, the union of named prefill workers down to the engine."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from tasuki.clock import FakeClock
from tasuki.messages import KnownPrefillWorkers, PrefillTarget, Role
from tasuki.server.prefill_roster import PrefillRoster
from tasuki.server.status import error_from_rpc
from tasuki.server.watch import WatchStreams
from tasuki.wire.watch import report_from_proto, watch_request_to_proto
from tests.server.fake_engine import load_report
from tests.server.running_worker import rpc_error, running
from tests.waiting import until


def target(name: str, epoch: int = 1) -> PrefillTarget:
    return PrefillTarget(worker_id=name, worker_epoch=epoch, address="127.0.0.1:9")


async def read(call: Any) -> Any:
    async with asyncio.timeout(10):
        return await call.read()


def test_the_roster_is_a_union_that_forgets() -> None:
    roster = PrefillRoster()
    assert roster.name([target("p1"), target("p2")], now=0)
    assert not roster.name([target("p2")], now=10)  # p1 is not named, but remembered
    assert roster.name([target("p3")], now=20)  # another router
    assert [t.worker_id for t in roster.workers] == ["p1", "p2", "p3"]
    assert not roster.expire(now=29.9)
    assert roster.expire(now=30)  # p1 unnamed for 30 s
    assert [t.worker_id for t in roster.workers] == ["p2", "p3"]
    assert roster.expire(now=50)
    assert roster.workers == []
    assert not roster.expire(now=99)


def test_a_new_epoch_replaces_the_old_one() -> None:
    roster = PrefillRoster()
    roster.name([target("p1", epoch=1)], now=0)
    assert roster.name([target("p1", epoch=2)], now=1)
    assert roster.workers == [target("p1", epoch=2)]
    assert not roster.name([target("p1", epoch=2)], now=2)


async def test_the_engine_hears_the_union_of_all_routers_on_change_only() -> None:
    async with running(Role.DECODE) as worker:
        clock = FakeClock()
        worker.server.watches._clock = clock
        first, second = worker.stub.Watch(), worker.stub.Watch()
        await first.write(watch_request_to_proto([target("p1")]))
        assert (await worker.engine.wait_for(KnownPrefillWorkers)).workers == [target("p1")]
        await second.write(watch_request_to_proto([target("p2")]))
        known = await worker.engine.wait_for(KnownPrefillWorkers, 2)
        assert known.workers == [target("p1"), target("p2")]
        clock.advance(20)
        await first.write(watch_request_to_proto([target("p1")]))  # nothing new
        await second.write(watch_request_to_proto([target("p1"), target("p3")]))
        known = await worker.engine.wait_for(KnownPrefillWorkers, 3)
        assert known.workers == [target("p1"), target("p2"), target("p3")]
        clock.advance(15)
        worker.server.watches.tick()  # p2 was not named for 35 s
        known = await worker.engine.wait_for(KnownPrefillWorkers, 4)
        assert known.workers == [target("p1"), target("p3")]
        for call in (first, second):
            call.cancel()
        await until(lambda: not len(worker.server.watches), "the streams are returned")


async def test_a_prefill_engine_is_not_told() -> None:
    async with running(Role.PREFILL) as worker:
        call = worker.stub.Watch()
        await call.write(watch_request_to_proto([target("p1")]))
        worker.engine.say(load_report(worker.engine, Role.PREFILL))
        await read(call)
        assert worker.engine.heard == []
        call.cancel()


async def test_every_router_gets_reports_and_a_new_one_the_latest_at_once() -> None:
    async with running(Role.DECODE) as worker:
        first, second = worker.stub.Watch(), worker.stub.Watch()
        for call in (first, second):
            await call.write(watch_request_to_proto([]))
        worker.engine.say(load_report(worker.engine, Role.DECODE, free_blocks=9))
        for call in (first, second):
            report = report_from_proto(await read(call))
            assert report.load.free_blocks == 9
            assert (report.block_size, report.max_model_len, report.model_id) == (16, 256, "tiny")
            assert report.load.worker_id == worker.server.state.worker_id
        late = worker.stub.Watch()
        await late.write(watch_request_to_proto([]))
        assert report_from_proto(await read(late)).load.free_blocks == 9
        for call in (first, second, late):
            call.cancel()


async def test_draining_shows_in_a_report_at_once() -> None:
    async with running(Role.DECODE) as worker:
        call = worker.stub.Watch()
        await call.write(watch_request_to_proto([]))
        worker.engine.say(load_report(worker.engine, Role.DECODE))
        assert report_from_proto(await read(call)).load.ready
        worker.server.begin_drain()
        load = report_from_proto(await read(call)).load
        assert (load.ready, load.draining) == (False, True)
        call.cancel()


async def test_a_slow_router_gets_the_latest_report_not_all() -> None:
    async with running(Role.DECODE) as worker:
        watches = WatchStreams(worker.server.state, worker.engine.send)
        gate, seen = asyncio.Event(), []

        async def write(report: Any) -> None:
            seen.append(report.free_blocks)
            await gate.wait()

        async def requests() -> Any:
            await asyncio.Event().wait()
            yield

        watches.report(load_report(worker.engine, Role.DECODE, free_blocks=1))
        serving = asyncio.create_task(watches.serve(requests(), write))
        await until(lambda: seen, "the first report")
        for free_blocks in range(2, 30):
            watches.report(load_report(worker.engine, Role.DECODE, free_blocks=free_blocks))
        gate.set()
        await until(lambda: seen[-1] == 29, "the latest report")
        assert seen == [1, 29]
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        assert len(watches) == 0


async def test_engine_death_ends_the_watch() -> None:
    async with running(Role.DECODE) as worker:
        call = worker.stub.Watch()
        await call.write(watch_request_to_proto([]))
        worker.engine.say(load_report(worker.engine, Role.DECODE))
        await read(call)
        worker.engine.die()
        try:
            await read(call)
        except grpc.aio.AioRpcError as error:
            caught = error_from_rpc(error)
        assert caught.reason == "engine_died"
        again = error_from_rpc(await rpc_error(worker.stub.Watch(timeout=5)))
        assert again.reason == "engine_died"


async def test_a_router_that_leaves_or_talks_nonsense_is_let_go() -> None:
    async with running(Role.DECODE) as worker:
        leaves = worker.stub.Watch()
        await leaves.write(watch_request_to_proto([target("p1")]))
        await leaves.done_writing()
        assert await leaves.code() is grpc.StatusCode.OK
        nonsense = worker.stub.Watch()
        wrong = watch_request_to_proto([])
        wrong.prefill_workers.add(worker_id="p", address="nowhere")
        await nonsense.write(wrong)
        assert await nonsense.code() is grpc.StatusCode.INVALID_ARGUMENT
