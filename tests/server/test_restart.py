"""An engine that dies is started again by its server, under a new epoch; not for ever."""

from __future__ import annotations

import grpc
import pytest

from tasuki.messages import KnownPrefillWorkers, PrefillTarget, Role, StartDecode
from tasuki.server.restarts import RestartBudget
from tasuki.server.status import error_from_rpc
from tasuki.wire.watch import report_from_proto, watch_request_to_proto
from tests.server.fake_engine import finished, load_report, tokens
from tests.server.running_worker import RunningWorker, decode_request, rpc_error, running
from tests.server.test_worker_server import read
from tests.waiting import until


async def replaced(worker: RunningWorker, deaths: int) -> None:
    await until(
        lambda: len(worker.engines) > deaths and worker.server.state.end is None,
        f"engine {deaths + 1} serves",
    )


async def test_streams_of_the_old_epoch_end_and_the_new_one_serves() -> None:
    async with running(Role.DECODE, restarts=2) as worker:
        call = worker.stub.Decode(decode_request())
        await worker.engine.wait_for(StartDecode)
        worker.engine.die("told to")
        error = error_from_rpc(await rpc_error(call))
        assert (error.code.value, error.reason) == ("UNAVAILABLE", "engine_died")
        await replaced(worker, 1)
        assert await worker.serving()
        assert not worker.server.ended.is_set()
        second = worker.engines[1]
        call = worker.stub.Decode(decode_request())
        start = await second.wait_for(StartDecode)
        second.emit(start.stream_id, tokens(0, 5), finished(1))
        first, last = await read(call), await read(call)
        assert list(first.tokens.token_ids) == [5]
        assert last.HasField("finished")
        counted = worker.server.metrics.registry.get_sample_value("tasuki_engine_restarts_total")
        assert counted == 1


async def test_a_watcher_sees_the_new_epoch_and_the_engine_its_prefill_workers() -> None:
    target = PrefillTarget(worker_id="p", worker_epoch=1, address="127.0.0.1:1")
    async with running(Role.DECODE, restarts=1) as worker:
        watch = worker.stub.Watch()
        await watch.write(watch_request_to_proto([target]))
        worker.engine.say(load_report(worker.engine, Role.DECODE))
        seen = report_from_proto(await read(watch))
        assert seen.load.worker_epoch == worker.engine.epoch
        worker.engine.die()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(watch)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await replaced(worker, 1)
        second = worker.engines[1]
        assert (await second.wait_for(KnownPrefillWorkers)).workers == [target]
        watch = worker.stub.Watch()
        await watch.write(watch_request_to_proto([target]))
        second.say(load_report(second, Role.DECODE))
        # nothing of the old epoch is told in between
        assert report_from_proto(await read(watch)).load.worker_epoch == second.epoch
        watch.cancel()


async def test_an_engine_that_keeps_dying_is_given_up() -> None:
    async with running(Role.PREFILL, restarts=2) as worker:
        for deaths in (1, 2):
            worker.engines[-1].die()
            await replaced(worker, deaths)
        worker.engines[-1].die()
        await until(worker.server.ended.is_set, "the worker gave up")
        assert not any(engine.heard for engine in worker.engines), "a prefill engine has no roster"
        assert len(worker.engines) == 3
        assert not await worker.serving()


@pytest.mark.parametrize("limit", [0, 3])
def test_the_budget_is_per_window(limit: int) -> None:
    budget = RestartBudget(limit, window=60.0)
    assert [budget.take(float(second)) for second in range(5)] == [n < limit for n in range(5)]
    assert budget.take(60.5) is (limit > 0)
    assert not budget.take(60.9)
