"""Two sides and everything between them, moved one item at a time: what the lease machine drives.

Streams never reorder within themselves; which stream moves next is the caller's choice. A side
that dies loses its memory, its links and whatever was on its way to it; a later one has a new
epoch. What was asked or answered before may come again.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tasuki.clock import FakeClock
from tasuki.kv.block_pool import BlockState
from tasuki.messages import LinkMessage
from tests.transfer.lease_decode import DecodeSide
from tests.transfer.lease_prefill import PrefillSide
from tests.transfer.lease_side import TIMEOUT, Ask, Reply
from tests.transfer.lease_streams import Stream, Wires


@dataclass(eq=False)
class Control:
    """A link's control stream, both directions; it dies as a whole."""

    to_prefill: Stream[LinkMessage]
    to_decode: Stream[LinkMessage]

    def cut(self, keep: int = 0) -> None:
        self.to_prefill.cut(keep)
        self.to_decode.cut(keep)


@dataclass(eq=False)
class Call:
    """A Prefill call: what is asked, then perhaps the cancel; and what comes back."""

    ask: Ask
    to_prefill: Stream[Ask]
    to_decode: Stream[Reply]


class World:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.wires = Wires()
        self.met: Counter[str] = Counter()  # what happened how often
        self.controls: dict[str, Control] = {}
        self.calls: list[Call] = []
        self.past_asks: list[Ask] = []
        self.past_replies: list[Reply] = []
        self.past_links: list[tuple[str, int, LinkMessage]] = []
        self.decode: DecodeSide | None = None
        self.prefill: PrefillSide | None = None
        self._ids = self._epochs = 0
        self.start_prefill()
        self.start_decode()

    # --- what sides ask of it (Network) -----------------------------------------------------------

    def to_peer(self, link_id: str, rank: int, message: LinkMessage) -> None:
        control = self.controls.get(link_id)
        if control is not None:
            (control.to_prefill if rank else control.to_decode).put(message)
            self.past_links.append((link_id, rank, message))

    def close_control(self, link_id: str) -> None:
        control = self.controls.get(link_id)
        if control is not None:
            control.cut(keep=10**6)  # what was said before the end arrives

    def call(self, ask: Ask) -> None:
        """Ask whichever prefill worker lives now. The end of a call's stream is its cancel."""
        prefill, decode = self.prefill, self.decode
        if prefill is None:
            failed = Reply(ask.handoff_id, "failed")
            if decode is not None:
                decode.call_soon(lambda: decode.on_reply(failed))
            return
        handoff_id = ask.handoff_id
        to_prefill = Stream(prefill.on_ask, lambda: prefill.on_cancel(handoff_id))
        to_decode: Stream[Reply]
        if decode is None:
            to_decode = Stream(lambda reply: None, lambda: None)
        else:
            failed = Reply(handoff_id, "failed")
            to_decode = Stream(decode.on_reply, lambda: decode.on_reply(failed))
        self.calls.append(Call(ask, to_prefill, to_decode))
        self.past_asks.append(ask)
        to_prefill.put(ask)

    def cancel_call(self, handoff_id: str) -> None:
        for call in self.calls:
            if call.ask.handoff_id == handoff_id:
                call.to_prefill.cut(10**6)
                call.to_decode.lose_reader()

    def reply(self, reply: Reply) -> None:
        for call in self.calls:
            if call.ask.handoff_id == reply.handoff_id and call.to_decode.open:
                call.to_decode.put(reply)
        self.past_replies.append(reply)

    # --- lives ------------------------------------------------------------------------------------

    def new_id(self, kind: str) -> str:
        self._ids += 1
        return f"{kind}{self._ids}"

    def start_prefill(self) -> None:
        self._epochs += 1
        self.prefill = PrefillSide(self, self._epochs)

    def start_decode(self) -> None:
        self._epochs += 1
        self.decode = DecodeSide(self, self._epochs)

    def kill_prefill(self, keep: int) -> None:
        self.prefill = None
        for control in self.controls.values():
            control.to_prefill.lose_reader()
            control.cut(keep)
        for call in self.calls:
            call.to_prefill.lose_reader()
            call.to_decode.cut(keep)
        self._break_wires()

    def kill_decode(self, keep: int) -> None:
        self.decode = None
        for control in self.controls.values():
            control.to_decode.lose_reader()
            control.cut(keep)
        for call in self.calls:
            call.to_decode.lose_reader()
            call.to_prefill.cut(keep)
        self._break_wires()

    def _break_wires(self) -> None:
        for wire in self.wires.by_link.values():
            wire.closed = True  # and nobody who waits on it is woken

    def open_link(self, prefill_epoch: int) -> None:
        decode, prefill, link_id = self.decode, self.prefill, self.new_id("link")
        assert decode is not None

        def end_decode() -> None:
            if link_id in decode.links:
                decode.links[link_id].close("peer_died")

        def read_decode(message: LinkMessage) -> None:
            if link_id in decode.links:
                decode.links[link_id].on_message(message)
            else:
                decode.stale += 1

        to_decode = Stream(read_decode, end_decode)
        to_prefill: Stream[LinkMessage]
        if prefill is None:
            to_prefill = Stream(lambda message: None, lambda: None)
        else:
            prefill.start_link(link_id)
            to_prefill = Stream(
                partial(prefill.receive, link_id), lambda: prefill.end_link(link_id)
            )
        self.controls[link_id] = Control(to_prefill, to_decode)
        decode.open_link(link_id, prefill_epoch)
        if prefill is None:
            self.controls[link_id].cut()

    # --- what moves -------------------------------------------------------------------------------

    def moves(self) -> list[Callable[[], None]]:
        """Everything that could happen next, each on a stream of its own."""
        streams: list[
            Stream[LinkMessage] | Stream[Ask] | Stream[Reply] | Stream[Callable[[], None]]
        ]
        streams = [side.soon for side in (self.decode, self.prefill) if side is not None]
        for control in self.controls.values():
            streams += [control.to_prefill, control.to_decode]
        for call in self.calls:
            streams += [call.to_prefill, call.to_decode]
        found = [stream.deliver for stream in streams if stream.waiting]
        found += [wire.move for wire in self.wires.by_link.values() if wire.can_move]
        return found

    def move(self, move: Callable[[], None]) -> None:
        move()
        for thread in threading.enumerate():
            if thread.name.startswith("link-open-"):
                thread.join()  # it only puts its result into the queue
        self._sweep()

    def _sweep(self) -> None:
        """Forget streams on which nothing will ever come."""
        self.calls = [
            c
            for c in self.calls
            if c.to_prefill.open or c.to_prefill.waiting or c.to_decode.waiting
        ]
        dead = [
            link_id
            for link_id, control in self.controls.items()
            if not (
                control.to_prefill.open or control.to_prefill.waiting or control.to_decode.waiting
            )
        ]
        for link_id in dead:
            del self.controls[link_id]
            self.wires.by_link.pop(link_id, None)

    def deliver_all(self) -> None:
        """Until nothing moves; what computes goes on as well."""
        for _ in range(10_000):
            moves = self.moves()
            if moves:
                self.move(moves[0])
            elif self.prefill is not None and (job := self.prefill.next_job):
                self.prefill.compute(job, 1)
            else:
                return
        raise AssertionError("it never comes to rest")

    def tick(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for side in (self.decode, self.prefill):
            if side is not None:
                side.tick()

    # --- what must hold ---------------------------------------------------------------------------

    def check(self) -> None:
        if self.decode is not None:
            self.decode.check()
            self._check_decode_exits(self.decode)
        if self.prefill is not None:
            self.prefill.check()
            self._check_prefill_exits(self.prefill)

    def _check_decode_exits(self, decode: DecodeSide) -> None:
        """Whatever is awaited has a deadline; a quarantine has a link whose fence ends it."""
        latest = self.clock() + TIMEOUT
        assert all(lease.handoff.deadline <= latest for lease in decode.leases.values())
        assert decode.links or not decode.blocks.pool.counts()[BlockState.QUARANTINED]

    def _check_prefill_exits(self, prefill: PrefillSide) -> None:
        """A job waits for itself (computing), for the peer, or behind one that does."""
        latest = self.clock() + TIMEOUT
        for job in prefill.jobs.values():
            if not job.stopped:
                continue
            handoffs = job.link._handoffs.values()
            deadline = min((h.deadline for h in handoffs), default=math.inf)
            if job.link.state == "opening":
                deadline = job.link.opened_deadline
            assert deadline < math.inf, f"{job.ask} waits for ever"
            assert deadline <= max(latest, job.link.opened_deadline)

    def settle(self) -> None:
        """Every message arrives and time passes: nothing is left but what runs."""
        for _ in range(8):
            self.deliver_all()
            self.tick(2.0)
            self.check()
        self.deliver_all()
        self._check_rest()

    def fall_silent(self) -> None:
        """No message arrives any more, in either direction; only clocks go on. Each side ends what
        it leased out by its own deadlines, and its quarantine when it is told that the link died.
        """
        for _ in range(6):  # one try, another anew
            while self.prefill is not None and (job := self.prefill.next_job):
                self.prefill.compute(job, 2)
            self.tick(2.0)
            self.check()
        assert self.decode is None or not self.decode.leases
        assert self.prefill is None or not self.prefill.jobs
        for control in self.controls.values():
            control.cut()
        for call in self.calls:
            call.to_prefill.cut(0)
            call.to_decode.cut(0)
        self.deliver_all()
        self._check_rest()

    def _check_rest(self) -> None:
        if self.decode is not None:
            held = [request.key for _, request in self.decode.running]
            assert not self.decode.leases
            assert not self.decode.blocks.leaked(held)
            assert self.decode.pool.counts()[BlockState.QUARANTINED] == 0
            assert self.decode.pool.counts()[BlockState.RESERVED] == 0
        if self.prefill is not None:
            assert not self.prefill.jobs
            assert self.prefill.pool.counts()[BlockState.IN_USE] == 0
