"""A decode worker reduced to its leases: reserve, dispatch, commit or fall back, and give back.

Does with blocks and links what decode/handoffs.py does with them, and computes by writing numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasuki.kv.block_pool import BlockState
from tasuki.messages import PrefillTarget
from tasuki.reasons import AbandonReason
from tasuki.request import Request
from tasuki.transfer.handoff import Handoff
from tasuki.transfer.link_events import (
    BlocksReleased,
    CommitSeen,
    DigestMismatch,
    LinkEvent,
    LinkFailed,
    PeerAbandoned,
    SegmentReceived,
)
from tasuki.transfer.receiving_link import ReceivingLink
from tests.transfer.lease_side import (
    LAYOUT,
    POISON,
    TIMEOUT,
    Ask,
    Network,
    Reply,
    Side,
    settings,
    value,
)

ANEW = " anew"


@dataclass(eq=False)
class Lease:
    """A handoff on the decode side, and what it is for."""

    prompt: int
    request: Request
    handoff: Handoff
    link: ReceivingLink
    tokens: int = 0


class DecodeSide(Side):
    rank = 1

    def __init__(self, world: Network, epoch: int) -> None:
        super().__init__(world, epoch, prefix_caching=True)
        self.links: dict[str, ReceivingLink] = {}
        self.leases: dict[str, Lease] = {}
        self.running: list[tuple[int, Request]] = []  # prompt and request; its prompt's KV is there

    @property
    def link(self) -> ReceivingLink | None:
        return next((link for link in self.links.values() if link.state == "open"), None)

    def open_link(self, link_id: str, prefill_epoch: int) -> None:
        target = PrefillTarget(worker_id="p", worker_epoch=prefill_epoch, address="")
        link = ReceivingLink(
            link_id, target, self.cache, self.world.wires, settings("d", self.epoch), self,
            lambda event: self.on_link_event(link, event), self.world.clock,
        )  # fmt: skip
        self.links[link_id] = link
        link.start()

    def submit(self, handoff_id: str, prompt: int, length: int, single: bool) -> None:
        link, request = self.link, self.request(prompt, length)
        known = self.blocks.match(request)
        if link is None or known.copies_last:
            self.blocks.free(request.key)
            return
        if not self.blocks.begin(request, known, length + 1, state=BlockState.RESERVED):
            self.blocks.free(request.key)
            return
        first = len(known.block_ids)
        assert self.content(request)[:first] == [value(prompt, i) for i in range(first)]
        self._dispatch(handoff_id, prompt, request, link, first, single)

    def _dispatch(
        self, handoff_id: str, prompt: int, request: Request, link: ReceivingLink, first: int,
        single: bool,
    ) -> None:  # fmt: skip
        now, length = self.world.clock(), request.prompt_len
        end = LAYOUT.blocks_for(length)
        handoff = Handoff(
            handoff_id, request.request_id, link.link_id, first, end - first,
            now=now, progress_timeout=TIMEOUT, reserve_timeout=TIMEOUT,
        )  # fmt: skip
        self.leases[handoff_id] = Lease(prompt, request, handoff, link)
        link.expect(handoff, self.blocks.table(request.key)[first:end])
        handoff.dispatch(now)
        epoch = link.target.worker_epoch
        self.world.call(Ask(handoff_id, link.link_id, epoch, prompt, length, first, single))

    def on_reply(self, reply: Reply) -> None:
        lease = self.leases.get(reply.handoff_id)
        if lease is None:
            self.stale += 1
            return
        now, handoff = self.world.clock(), lease.handoff
        assert reply.kind == "failed" or reply.epoch == lease.link.target.worker_epoch
        match reply.kind:
            case "accepted":
                handoff.accept(now)
            case "progress":
                handoff.progress(now)
            case "first_token":
                lease.tokens += handoff.first_token(now)
                self._join(lease)
            case "single":  # the first token was the last
                handoff.first_token(now)
                self.drop(reply.handoff_id, AbandonReason.FINISHED)
            case "failed":
                self.fall_back(lease, AbandonReason.PREFILL_DIED)

    def on_link_event(self, link: ReceivingLink, event: LinkEvent) -> None:
        match event:
            case SegmentReceived() | CommitSeen():
                if event.handoff_id in self.leases:
                    self._join(self.leases[event.handoff_id])
            case PeerAbandoned():
                if event.handoff_id in self.leases and event.reason != "finished":
                    self.fall_back(self.leases[event.handoff_id], AbandonReason.PREFILL_DIED)
            case BlocksReleased():
                self.blocks.release(event.block_ids)
            case DigestMismatch():
                raise AssertionError("a block was read after it was freed, or written too early")
            case LinkFailed():
                for lease in [one for one in self.leases.values() if one.link is link]:
                    self.fall_back(lease, AbandonReason.LINK_DOWN)
                self.blocks.release(event.released_block_ids)
                del self.links[link.link_id]
                self.world.close_control(link.link_id)

    def _join(self, lease: Lease) -> None:
        if not (lease.handoff.is_committed and lease.tokens):
            return
        assert lease.tokens == 1
        del self.leases[lease.handoff.handoff_id]
        lease.link.forget(lease.handoff.handoff_id)
        request = lease.request
        assert lease.handoff.tokens == request.prompt_len
        self.blocks.commit(request.key)
        request.num_computed_tokens = request.prompt_len
        self._run(lease)
        self.blocks.publish(request)
        self.world.met["committed"] += 1

    def fall_back(self, lease: Lease, reason: AbandonReason) -> None:
        handoff, request = lease.handoff, lease.request
        run = handoff.first_block + handoff.received_run
        handoff.abandon(reason, self.world.clock())
        in_flight = lease.link.abandon(handoff.handoff_id, reason)
        del self.leases[handoff.handoff_id]
        self.world.cancel_call(handoff.handoff_id)
        if self._ask_anew(lease, run, in_flight):
            return
        self.blocks.abandon(request.key, run, in_flight)
        self.world.met[f"fell back: {reason}"] += 1
        table = self.blocks.table(request.key)
        if not table:
            return
        kept = self.content(request)[:run]
        assert kept == [value(lease.prompt, i) for i in range(len(kept))], "what arrived is kept"
        self.write(request, lease.prompt, run, LAYOUT.blocks_for(request.prompt_len))
        self._run(lease)

    def _ask_anew(self, lease: Lease, run: int, in_flight: frozenset[int]) -> bool:
        """Once, while nothing of it was told. Blocks in flight are replaced."""
        request, before = lease.request, lease.handoff.handoff_id
        if lease.tokens or run == LAYOUT.blocks_for(request.prompt_len) or before.endswith(ANEW):
            return False
        if self.link is None or not self.blocks.replace(request.key, in_flight):
            return False
        self.world.met["asked anew around blocks in flight" if in_flight else "asked anew"] += 1
        self._dispatch(before + ANEW, lease.prompt, request, self.link, run, single=False)
        return True

    def _run(self, lease: Lease) -> None:
        self.running.append((lease.prompt, lease.request))
        self.check_content()

    def drop(self, handoff_id: str, reason: AbandonReason) -> None:
        lease = self.leases.pop(handoff_id)
        lease.handoff.abandon(reason, self.world.clock())
        in_flight = lease.link.abandon(handoff_id, reason)
        self.blocks.free(lease.request.key, in_flight)
        self.world.cancel_call(handoff_id)

    def finish(self, index: int) -> None:
        _, request = self.running.pop(index)
        self.blocks.free(request.key)

    def tick(self) -> None:
        for lease in list(self.leases.values()):
            if lease.handoff.expired(self.world.clock()):
                self.fall_back(lease, AbandonReason.STALLED)
        for link in list(self.links.values()):
            link.expire()

    def check_content(self) -> None:
        """Who may decode has its whole prompt, every block in its place."""
        for prompt, request in self.running:
            content = self.content(request)[: LAYOUT.blocks_for(request.prompt_len)]
            assert content == [value(prompt, i) for i in range(len(content))]

    def check(self) -> None:
        self.check_memory(
            [one.request.key for one in self.leases.values()] + [r.key for _, r in self.running]
        )
        self.check_content()
        for lease in self.leases.values():
            lease.handoff.check_integrity()
            for place, found in enumerate(self.content(lease.request)):
                assert found in (POISON, value(lease.prompt, place)), "a block of somebody else"
        for link in self.links.values():
            link.check_integrity()
