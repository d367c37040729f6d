"""The registry over real Watch streams: states, reconnects, who is named to decode workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from router.charge import Charge
from router.placement import Placement, PlacementPolicy, PlacementRequest, place
from router.workers.registry import Registry
from router.workers.watched_worker import WatchLimits
from tasuki.errors import UnavailableError
from tasuki.messages import Role
from tasuki.server.grpc_server import internal_channel
from tests.router.conftest import MakeHarness
from tests.router.fake_worker import MODEL_ID, FakeWorker, wait_until


async def test_decode_workers_are_told_of_prefill_workers_and_of_their_end(
    harness: MakeHarness,
) -> None:
    async with harness(prefill=2, decode=1) as h:
        decode = h.decodes[0]
        await wait_until(lambda: len(decode.targets) == 2, "both are named")
        assert {(t.worker_id, t.worker_epoch) for t in decode.targets} == {("p0", 11), ("p1", 11)}
        assert {t.address for t in decode.targets} == {p.address for p in h.prefills}
        assert all(not prefill.targets for prefill in h.prefills)
        await h.prefills[0].report(worker_epoch=12)  # its engine restarted
        await wait_until(
            lambda: ("p0", 12) in {(t.worker_id, t.worker_epoch) for t in decode.targets},
            "the new epoch is named",
        )
        await h.prefills[1].stop()
        await wait_until(lambda: len(decode.targets) == 1, "the dead one is not named any more")


async def test_a_worker_that_comes_back_is_used_again(harness: MakeHarness) -> None:
    async with harness() as h:
        worker = h.decodes[0]
        port = int(worker.address.rpartition(":")[2])
        await worker.stop()
        await wait_until(lambda: h.router.why_not_ready() is not None, "lost")
        assert h.metric("workers", role="decode", state="lost") == 1
        await worker.start(port)
        await wait_until(lambda: h.router.why_not_ready() is None, "back")
        assert h.metric("workers", role="decode", state="ready") == 1
        assert (await h.outputs(text="x", max_tokens=1))[-1].usage.completion_tokens == 1


async def test_silence_is_a_loss(harness: MakeHarness) -> None:
    async with harness(report_timeout=0.2) as h:
        await wait_until(lambda: h.router.why_not_ready() is not None, "no report for 0.2 s")


@pytest.mark.parametrize("wrong", ["role", "model"])
async def test_the_wrong_process_is_not_used(wrong: str) -> None:
    worker = FakeWorker(Role.DECODE, "d0", model_id="another" if wrong == "model" else MODEL_ID)
    await worker.start()
    side = "prefill_addresses" if wrong == "role" else "decode_addresses"
    addresses = {"prefill_addresses": (), "decode_addresses": ()} | {side: (worker.address,)}
    registry = Registry(
        **addresses,
        model_id=MODEL_ID,
        limits=WatchLimits(connect=2.0, report=2.0),
        connect=internal_channel,
    )
    await registry.start()
    try:
        await wait_until(lambda: worker.watch_requests >= 2, "it was asked, and asked again")
        assert not registry.snapshots()[0].usable
    finally:
        await registry.close()
        await worker.stop()


async def follow(harness: MakeHarness, check: Callable[[Registry, FakeWorker], None]) -> None:
    async with harness(prefill=1) as h:
        await wait_until(lambda: bool(h.decodes[0].targets), "linked")
        check(h.router.registry, h.decodes[0])


async def test_charges_move_with_the_events(harness: MakeHarness) -> None:
    def check(registry: Registry, worker: FakeWorker) -> None:
        policy = PlacementPolicy(split_min_tokens=64)
        request = PlacementRequest(prompt_len=100, max_tokens=4)
        decision = place(request, registry.snapshots(), policy)
        assert isinstance(decision, Placement)
        assert decision.kind == "split"
        charge = Charge(1, registry, decision, request)
        decode, prefill = registry.worker(worker.address), registry.prefill_worker("p0")
        assert prefill is not None
        assert (decode.ledgers.blocks.total, decode.ledgers.requests.total) == (7, 1)
        assert (decode.ledgers.tokens.total, prefill.ledgers.tokens.total) == (0, 100)
        charge.dispatched("p0")
        decode.ledgers.reported()
        assert (decode.ledgers.blocks.total, decode.ledgers.requests.total) == (0, 0)
        assert prefill.ledgers.tokens.total == 100
        charge.local()  # a fallback: the rest is computed on the decode worker
        assert (decode.ledgers.tokens.total, prefill.ledgers.tokens.total) == (100, 0)
        charge.first_token()
        assert decode.ledgers.tokens.total == 0
        assert decode.snapshot.load == 1  # still there, whatever a report says
        charge.release()
        charge.release()
        assert decode.snapshot.load == 0

    await follow(harness, check)


async def test_many_requests_spread_over_workers_between_two_reports(harness: MakeHarness) -> None:
    async with harness(decode=2) as h:
        await asyncio.gather(*(h.outputs(text="x", max_tokens=5) for _ in range(20)))
        counts = [len(worker.decodes) for worker in h.decodes]
        assert min(counts) >= 5, counts


async def test_a_reset_of_the_prefix_cache_reaches_every_worker(harness: MakeHarness) -> None:
    async with harness(prefill=1, decode=2) as h:
        assert await h.router.registry.reset_prefix_caches() == 15
        assert [worker.resets for worker in (*h.prefills, *h.decodes)] == [1, 1, 1]
        await h.prefills[0].stop()
        with pytest.raises(UnavailableError, match="1 of 3 workers"):
            await h.router.registry.reset_prefix_caches()
        assert [worker.resets for worker in h.decodes] == [2, 2]
