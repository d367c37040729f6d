"""The clauses of the contract between scheduler and workers that are the handoff's: C1, C2, C4 to
C7, C11 and C17. C4, C5 and C11 have more tests beside links, channels and the machine itself.
"""

from __future__ import annotations

import msgspec
import pytest

from tasuki.kv.block_pool import BlockState
from tasuki.messages import Announce, Commit, PrefillRequest, SamplingParams
from tasuki.reasons import AbandonReason
from tasuki.transfer.handoff import HandoffState
from tests.transfer.lease_decode import DecodeSide, Lease
from tests.transfer.lease_prefill import PrefillSide
from tests.transfer.lease_side import LAYOUT, NUM_BLOCKS, value
from tests.transfer.lease_world import World
from tests.transfer.rig import make_rig


@pytest.fixture
def world() -> World:
    world = World()
    assert world.prefill is not None
    world.open_link(world.prefill.epoch)
    world.deliver_all()
    return world


def sides(world: World) -> tuple[DecodeSide, PrefillSide]:
    assert world.decode is not None
    assert world.prefill is not None
    return world.decode, world.prefill


def submit(world: World, prompt: int, length: int) -> Lease:
    decode, _ = sides(world)
    handoff_id = world.new_id("h")
    decode.submit(handoff_id, prompt, length, False)
    return decode.leases[handoff_id]


def until_announced(world: World) -> None:
    """Deliver and compute until bytes could move."""
    _, prefill = sides(world)
    while not any(wire.can_move for wire in world.wires.by_link.values()):
        moves = world.moves()
        if moves:
            world.move(moves[0])
        else:
            job = prefill.next_job
            assert job is not None
            prefill.compute(job, 1)


def test_c1_the_decode_worker_alone_decides_what_lands_where() -> None:
    """A peer can neither begin a handoff nor name a block: what was not asked for goes nowhere."""
    rig = make_rig()
    rig.open()
    before = rig.target.tensor.clone()
    rig.sender.begin("never asked for", 0, 2)
    rig.sender.offer("never asked for", 0, [1, 2])
    rig.sender.commit("never asked for", 32)
    rig.run_until(lambda: rig.receiver.stale == 2 and not rig.sender.unreceived_bytes)
    assert bool((rig.target.tensor == before).all())
    named = set(Announce.__struct_fields__) | set(Commit.__struct_fields__)
    assert not {name for name in named if "id" in name} - {"handoff_id"}
    rig.close()


def test_c2_a_dispatch_names_request_attempt_epochs_prefix_and_tokens() -> None:
    """None of them has a default: a call without one is refused as it is read."""
    request = PrefillRequest(
        request_id="r", handoff_id="0" * 32, link_id="1" * 32, prefill_epoch=7,
        decode_worker_id="d", decode_epoch=8, prompt_token_ids=[1, 2, 3], first_block=1,
        sampling=SamplingParams(),
    )  # fmt: skip
    fields = msgspec.structs.fields(PrefillRequest)
    required = [field.name for field in fields if field.required]
    attempt = {"request_id", "handoff_id", "link_id", "prefill_epoch", "decode_epoch"}
    assert attempt | {"first_block", "prompt_token_ids"} <= set(required)
    whole = msgspec.to_builtins(request)
    assert msgspec.convert(whole, PrefillRequest) == request
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(whole[: len(required) - 1], PrefillRequest)


def test_c4_a_dispatch_of_an_old_epoch_and_an_answer_to_an_old_attempt_change_nothing(
    world: World,
) -> None:
    decode, prefill = sides(world)
    submit(world, 1, 3)
    world.deliver_all()
    old_ask, old_replies = world.past_asks[0], list(world.past_replies)
    world.kill_prefill(0)
    world.start_prefill()
    _, prefill = sides(world)
    world.call(old_ask)
    world.deliver_all()
    assert (prefill.refused, prefill.jobs) == (1, {})
    stale, running = decode.stale, list(decode.running)
    for reply in old_replies:
        decode.on_reply(reply)
    assert decode.stale == stale + len(old_replies)
    assert decode.running == running
    world.check()


def test_c5_a_cancelled_lease_ends_at_once_but_its_blocks_wait_for_the_bytes(world: World) -> None:
    decode, _ = sides(world)
    lease = submit(world, 1, 3)
    until_announced(world)
    decode.drop(lease.handoff.handoff_id, AbandonReason.CANCELLED)
    assert lease.handoff.state is HandoffState.ABANDONED
    counts = decode.pool.counts()
    assert counts[BlockState.QUARANTINED] == len(lease.handoff.posted) > 0
    assert counts[BlockState.RESERVED] == 0
    world.deliver_all()
    assert decode.pool.num_free == NUM_BLOCKS
    world.settle()


def test_c6_a_retry_gives_no_second_token_and_frees_nothing_twice(world: World) -> None:
    decode, prefill = sides(world)
    lease = submit(world, 1, 5)
    for call in list(world.calls):
        world.move(call.to_prefill.deliver)
    world.call(world.past_asks[0])  # the same attempt while it is under way: refused
    world.move(world.calls[-1].to_prefill.deliver)
    assert prefill.refused == 1
    world.deliver_all()
    assert lease.tokens <= 1
    assert len(decode.running) == 1
    world.call(world.past_asks[0])  # and after its end: an orphan, whose answers nobody takes
    world.deliver_all()
    assert len(decode.running) == 1
    decode.finish(0)
    world.settle()  # every pool asserts that what is freed was held
    assert decode.pool.num_free == prefill.pool.num_free == NUM_BLOCKS


@pytest.mark.parametrize("length", range(1, 9))
def test_c7_a_handoff_moves_the_prompt_and_reserves_room_for_the_token_that_is_pending(
    world: World, length: int
) -> None:
    decode, _ = sides(world)
    lease = submit(world, 1, length)
    assert decode.pool.counts()[BlockState.RESERVED] == LAYOUT.blocks_for(length + 1)
    assert lease.handoff.num_blocks == LAYOUT.blocks_for(length)
    world.deliver_all()
    assert world.met["committed"] == 1
    assert lease.handoff.tokens == lease.request.num_computed_tokens == length
    assert decode.pool.counts()[BlockState.RESERVED] == 0
    assert len(decode.blocks.table(lease.request.key)) == LAYOUT.blocks_for(length + 1)


def test_c7_a_reservation_of_which_nothing_travels_is_released_at_once(world: World) -> None:
    decode, _ = sides(world)
    lease = submit(world, 1, 5)
    decode.drop(lease.handoff.handoff_id, AbandonReason.CANCELLED)
    assert decode.pool.num_free == NUM_BLOCKS


def test_c11_two_prompts_at_once_keep_their_blocks_and_positions_apart(world: World) -> None:
    decode, prefill = sides(world)
    leases = [submit(world, prompt, 5) for prompt in (1, 2)]
    while world.met["committed"] < 2:
        if job := prefill.next_job:
            prefill.compute(job, 1)
            prefill.jobs[job.ask.handoff_id] = prefill.jobs.pop(job.ask.handoff_id)  # in turns
        for move in world.moves():
            move()
    for prompt, lease in enumerate(leases, 1):
        assert decode.content(lease.request)[:3] == [value(prompt, place) for place in range(3)]


@pytest.mark.parametrize("count", [1, 2])
def test_c17_a_transfer_costs_at_least_its_bytes_over_bandwidth_and_the_protocol(
    world: World, count: int
) -> None:
    """Time passes only where bytes move and messages cross. What a handoff says it took covers its
    bytes and the crossing of Posted; two on one link take the time of both.
    """
    bandwidth, latency = 64.0, 0.05  # bytes per second, seconds
    _, prefill = sides(world)
    handoffs = [submit(world, prompt, 5).handoff for prompt in range(1, 1 + count)]
    while not all(handoff.is_committed for handoff in handoffs):
        for job in [job for job in prefill.jobs.values() if not job.stopped]:
            prefill.compute(job, 8)
        move = world.moves()[0]
        wire = next((w for w in world.wires.by_link.values() if move == w.move), None)
        nbytes = 0 if wire is None else wire.sends[0][0].numel()
        world.clock.advance(latency if wire is None else nbytes / bandwidth)
        world.move(move)
    own = [handoff.num_blocks * LAYOUT.block_bytes / bandwidth for handoff in handoffs]
    for handoff, bytes_time in zip(handoffs, own, strict=True):
        assert handoff.timings().transfer >= bytes_time + latency
    first = min(handoff.first_announce or 0.0 for handoff in handoffs)
    assert max(handoff.committed_at or 0.0 for handoff in handoffs) - first >= sum(own) + latency
