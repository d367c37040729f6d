"""A prefill worker reduced to its leases: accept, compute and offer, commit or abandon, drain.

Does with blocks and links what prefill/core.py does with them, and computes by writing numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasuki.errors import TransferError
from tasuki.messages import LinkHello, LinkMessage
from tasuki.reasons import AbandonReason
from tasuki.request import Request
from tasuki.transfer.link_events import HandoffDrained, LinkEvent, LinkFailed
from tasuki.transfer.sending_link import SendingLink
from tests.transfer.lease_side import LAYOUT, Ask, Network, Reply, Side, settings, value


@dataclass(eq=False)
class Job:
    """A handoff on the prefill side."""

    ask: Ask
    request: Request
    link: SendingLink
    computed: int = 0  # blocks
    stopped: bool = False  # computed to the end, or given up
    drained: bool = False


class PrefillSide(Side):
    def __init__(self, world: Network, epoch: int) -> None:
        super().__init__(world, epoch, prefix_caching=False)
        self.links: dict[str, SendingLink] = {}
        self.jobs: dict[str, Job] = {}
        self.refused = 0

    def start_link(self, link_id: str) -> None:
        link = SendingLink(
            link_id, self.cache, self.world.wires, settings("p", self.epoch), self,
            lambda event: self.on_link_event(link, event), self.world.clock,
        )  # fmt: skip
        self.links[link_id] = link

    def end_link(self, link_id: str) -> None:
        """The control stream ended."""
        if link_id in self.links:
            self.links[link_id].close("peer_died")

    @property
    def next_job(self) -> Job | None:
        """The oldest one with something to compute."""
        return next((job for job in self.jobs.values() if not job.stopped), None)

    def receive(self, link_id: str, message: LinkMessage) -> None:
        link = self.links.get(link_id)
        if link is None:
            self.stale += 1
            return
        if isinstance(message, LinkHello):
            for older in [one for one in self.links.values() if one is not link]:
                older.close("replaced")
        link.on_message(message)

    def on_ask(self, ask: Ask) -> None:
        link = self.links.get(ask.link_id)
        request = self.request(ask.prompt, ask.length)
        known = ask.handoff_id in self.jobs or ask.prefill_epoch != self.epoch or link is None
        if known or not self.blocks.begin(request, self.blocks.match(request), ask.length):
            self.refused += 1
            self._reply(ask.handoff_id, "failed")
            return
        assert link is not None
        try:
            needed = LAYOUT.blocks_for(ask.length) - ask.first_block
            link.begin(ask.handoff_id, ask.first_block, needed)
        except TransferError:
            self.blocks.free(request.key)
            self._reply(ask.handoff_id, "failed")
            return
        self.jobs[ask.handoff_id] = Job(ask, request, link)
        self._reply(ask.handoff_id, "accepted")

    def _reply(self, handoff_id: str, kind: str) -> None:
        self.world.reply(Reply(handoff_id, kind, self.epoch))

    def on_cancel(self, handoff_id: str) -> None:
        job = self.jobs.get(handoff_id)
        if job is not None:
            job.stopped = True
            job.link.abandon(handoff_id, AbandonReason.CANCELLED)
            self._settle(job)

    def compute(self, job: Job, count: int) -> None:
        """`count` more blocks of the prompt, and whatever follows from that."""
        ask, total = job.ask, LAYOUT.blocks_for(job.ask.length)
        begin, job.computed = job.computed, min(job.computed + count, total)
        self.write(job.request, ask.prompt, begin, job.computed)
        table = self.blocks.table(job.request.key)
        first = max(begin, ask.first_block)
        done = job.computed == total
        if done:
            job.stopped = True
            self._reply(ask.handoff_id, "single" if ask.single else "first_token")
        else:
            self._reply(ask.handoff_id, "progress")
        if first < job.computed and not ask.single:
            job.link.offer(ask.handoff_id, first, table[first : job.computed])
        if done and ask.single:
            job.link.abandon(ask.handoff_id, AbandonReason.FINISHED)
        elif done:
            job.link.commit(ask.handoff_id, ask.length)
        self._settle(job)

    def on_link_event(self, link: SendingLink, event: LinkEvent) -> None:
        match event:
            case HandoffDrained():
                self.jobs[event.handoff_id].drained = True
                self._settle(self.jobs[event.handoff_id])
            case LinkFailed():
                for job in [job for job in self.jobs.values() if job.link is link]:
                    job.stopped = job.drained = True
                    self._settle(job, "failed")
                del self.links[link.link_id]
                self.world.close_control(link.link_id)

    def _settle(self, job: Job, kind: str = "done") -> None:
        if job.stopped and job.drained and job.ask.handoff_id in self.jobs:
            del self.jobs[job.ask.handoff_id]
            self.blocks.free(job.request.key)
            self._reply(job.ask.handoff_id, kind)

    def tick(self) -> None:
        for link in list(self.links.values()):
            link.expire()

    def check(self) -> None:
        self.check_memory([job.request.key for job in self.jobs.values()])
        for link in self.links.values():
            link.check_integrity()
        for job in self.jobs.values():
            content = self.content(job.request)[: job.computed]
            assert content == [value(job.ask.prompt, i) for i in range(job.computed)]
