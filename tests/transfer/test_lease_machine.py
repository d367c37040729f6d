"""Both sides of many handoffs against each other, over streams that delay, break off, repeat what
was said before and lose their ends, while either side dies and comes back.

Never is a block freed twice, lost, written after it was freed or read after it was freed; what
decodes has its own prompt, whole and in order; nothing old is taken for new; everything ends.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tasuki.kv.block_pool import BlockState
from tasuki.reasons import AbandonReason
from tests.transfer.lease_decode import DecodeSide
from tests.transfer.lease_prefill import PrefillSide
from tests.transfer.lease_world import World

picks = st.integers(0, 1 << 20)
keeps = st.integers(0, 4)
SINGLE = [False] * 7 + [True]
TROUBLES = ["cut_a_call", "cut_a_link", "kill_prefill", "kill_decode", "open_another", "pause"]
REPEATS = ["ask_again", "say_again", "repeat_on_a_link"]
WALK = {
    "submit": 12, "deliver": 30, "compute": 12, "carry_on": 8, "finish": 6, "cancel": 4,
    "time": 3, "trouble": 4, "repeat": 6, "restart": 8,
}  # fmt: skip
met: Counter[str] = Counter()
MEANT = [
    *("committed", "finished", "quarantined", "settled", "fell silent"),
    *("asked anew", "asked anew around blocks in flight"),
    *("prefill killed", "decode killed", "cancelled: dispatched", "cancelled: transferring"),
    *(f"fell back: {why}" for why in ("stalled", "link_down", "prefill_died")),
]


class LeaseMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.world.open_link(self.prefill.epoch)
        self.world.deliver_all()

    @property
    def decode(self) -> DecodeSide:
        assert self.world.decode is not None
        return self.world.decode

    @property
    def prefill(self) -> PrefillSide:
        assert self.world.prefill is not None
        return self.world.prefill

    # --- work -------------------------------------------------------------------------------------

    @rule(prompt=st.integers(1, 3), length=st.integers(1, 9), single=st.sampled_from(SINGLE))
    @precondition(lambda self: self.world.decode is not None)
    def submit(self, prompt: int, length: int, single: bool) -> None:
        if not self.decode.links and self.world.prefill is not None:
            self.world.open_link(self.prefill.epoch)
        self.decode.submit(self.world.new_id("h"), prompt, length, single)

    @rule(pick=picks, count=st.integers(1, 4))
    @precondition(lambda self: self.world.prefill is not None and self.prefill.next_job)
    def compute(self, pick: int, count: int) -> None:
        jobs = [job for job in self.prefill.jobs.values() if not job.stopped]
        self.prefill.compute(jobs[pick % len(jobs)], count)

    @rule(order=st.lists(picks, min_size=1, max_size=6))
    @precondition(lambda self: self.world.moves())
    def deliver(self, order: list[int]) -> None:
        for pick in order:
            if moves := self.world.moves():
                self.world.move(moves[pick % len(moves)])

    @rule(pick=picks, count=st.integers(1, 30))
    def carry_on(self, pick: int, count: int) -> None:
        """One stream after the other, and some computing in between: how lives get long."""
        for _ in range(count):
            if moves := self.world.moves():
                self.world.move(moves[pick % len(moves)])
            elif self.world.prefill is not None and (job := self.prefill.next_job):
                self.prefill.compute(job, 1)

    @rule(pick=picks)
    @precondition(lambda self: self.world.decode is not None and self.decode.running)
    def finish(self, pick: int) -> None:
        self.decode.finish(pick % len(self.decode.running))
        self.world.met["finished"] += 1

    @rule(seconds=st.sampled_from([0.1, 0.5, 0.5, 1.0, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.tick(seconds)

    # --- trouble ----------------------------------------------------------------------------------

    @rule(pick=picks)
    @precondition(lambda self: self.world.decode is not None and self.decode.leases)
    def cancel(self, pick: int) -> None:
        handoff_id = list(self.decode.leases)[pick % len(self.decode.leases)]
        self.world.met[f"cancelled: {self.decode.leases[handoff_id].handoff.state}"] += 1
        self.decode.drop(handoff_id, AbandonReason.CANCELLED)

    @rule(kind=st.sampled_from(TROUBLES), pick=picks, keep=keeps)
    def trouble(self, kind: str, pick: int, keep: int) -> None:
        getattr(self, kind)(pick, keep)

    def cut_a_call(self, pick: int, keep: int) -> None:
        if calls := self.world.calls:
            calls[pick % len(calls)].to_prefill.cut(keep)
            calls[pick % len(calls)].to_decode.cut(keep)

    def cut_a_link(self, pick: int, keep: int) -> None:
        if controls := list(self.world.controls.values()):
            controls[pick % len(controls)].cut(keep)

    def pause(self, pick: int, keep: int) -> None:
        self.world.tick(5.0)

    def open_another(self, pick: int, keep: int) -> None:
        """Perhaps to an epoch that is over; if not, it takes the place of the older one."""
        if self.world.decode is not None:
            epoch = 1 if self.world.prefill is None else self.prefill.epoch
            self.world.open_link(epoch - pick % 2)

    def kill_prefill(self, pick: int, keep: int) -> None:
        if self.world.prefill is not None:
            self.world.met["prefill killed"] += bool(self.prefill.jobs)
            self.world.kill_prefill(keep)

    def kill_decode(self, pick: int, keep: int) -> None:
        if self.world.decode is not None:
            self.world.met["decode killed"] += bool(self.decode.leases)
            self.world.kill_decode(keep)

    @rule()
    @precondition(lambda self: self.world.prefill is None or self.world.decode is None)
    def restart(self) -> None:
        if self.world.prefill is None:
            self.world.start_prefill()
        if self.world.decode is None:
            self.world.start_decode()

    @rule(kind=st.sampled_from(REPEATS), pick=picks)
    def repeat(self, kind: str, pick: int) -> None:
        getattr(self, kind)(pick)

    def ask_again(self, pick: int) -> None:
        """The same handoff, asked for twice; its epoch or its link may be long gone."""
        if asks := self.world.past_asks:
            self.world.call(asks[pick % len(asks)])

    def say_again(self, pick: int) -> None:
        """An answer to a handoff that is over."""
        replies = self.world.past_replies
        if self.world.decode is None or not replies:
            return
        reply = replies[pick % len(replies)]
        if reply.handoff_id not in self.decode.leases:
            before = self.decode.stale
            self.decode.on_reply(reply)
            assert self.decode.stale == before + 1

    def repeat_on_a_link(self, pick: int) -> None:
        """A message to a link that is gone."""
        messages = self.world.past_links
        if self.world.prefill is None or not messages:
            return
        link_id, rank, message = messages[pick % len(messages)]
        if rank and link_id not in self.prefill.links:
            before = self.prefill.stale
            self.prefill.receive(link_id, message)
            assert self.prefill.stale == before + 1

    # --- what holds -------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        self.world.met["steps"] += 1
        if self.world.decode is not None:
            quarantined = self.decode.pool.counts()[BlockState.QUARANTINED]
            self.world.met["quarantined"] += bool(quarantined)
        self.world.check()

    def teardown(self) -> None:
        silent = int(self.world.clock() * 2) % 2
        self.world.met["fell silent" if silent else "settled"] += 1
        (self.world.fall_silent if silent else self.world.settle)()
        met.update(self.world.met)


def run(examples: int, steps: int) -> None:
    chosen = settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    run_state_machine_as_test(LeaseMachine, settings=chosen)


def walk(seed: int, steps: int) -> None:
    """The same rules in an order drawn from `seed`: what it meets depends on nothing else."""
    rng, machine = random.Random(seed), LeaseMachine()
    for _ in range(steps):
        kind = rng.choices(list(WALK), list(WALK.values()))[0]
        move = possible(machine, rng).get(kind)
        if move is not None:
            move()
        machine.holds()
    machine.teardown()


def possible(machine: LeaseMachine, rng: random.Random) -> dict[str, Callable[[], None]]:
    """The rules whose conditions hold, by name, with arguments drawn."""
    world, pick = machine.world, rng.randrange(1 << 20)
    moves: dict[str, Callable[[], None]] = {
        "carry_on": lambda: machine.carry_on(pick, rng.randint(1, 30)),
        "time": lambda: machine.time_passes(rng.choice([0.1, 0.5, 1.0, 2.0])),
        "trouble": lambda: machine.trouble(rng.choice(TROUBLES), pick, rng.randint(0, 4)),
        "repeat": lambda: machine.repeat(rng.choice(REPEATS), pick),
        "restart": machine.restart,
    }
    if world.moves():
        order = [rng.randrange(1 << 20) for _ in range(rng.randint(1, 6))]
        moves["deliver"] = lambda: machine.deliver(order)
    if world.prefill is not None and machine.prefill.next_job:
        moves["compute"] = lambda: machine.compute(pick, rng.randint(1, 4))
    if world.decode is not None:
        length, single = rng.randint(1, 9), rng.choice(SINGLE)
        moves["submit"] = lambda: machine.submit(rng.randint(1, 3), length, single)
        if machine.decode.running:
            moves["finish"] = lambda: machine.finish(pick)
        if machine.decode.leases:
            moves["cancel"] = lambda: machine.cancel(pick)
    return moves


def test_whatever_happens_every_block_has_one_owner_and_everything_ends() -> None:
    met.clear()
    for seed in range(200):
        walk(seed, 110)
    assert met["steps"] >= 20_000
    for what in MEANT:
        assert met[what] >= 5, f"{what} is what this is about: {met}"


def test_what_hypothesis_finds() -> None:
    run(60, 60)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_whatever_happens_for_half_a_million_steps() -> None:
    met.clear()
    run(1500, 180)
    for seed in range(1000, 2500):
        walk(seed, 200)
    assert met["steps"] >= 500_000
