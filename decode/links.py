"""The links of a decode worker: opened in the background as prefill workers become known.

Knows nothing about requests. One attempt at a time, so that a worker that does not answer holds
up only the attempts behind it, never a request: a request uses the links that are open when it
comes.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tasuki.clock import Clock
from tasuki.kv.cache import KVCache
from tasuki.messages import (
    CloseLink,
    FromEngine,
    LinkMessage,
    LinkReport,
    OpenLink,
    PrefillTarget,
)
from tasuki.transfer.connector import Connector
from tasuki.transfer.link import LinkHost, LinkSettings
from tasuki.transfer.link_events import LinkEvent, LinkFailed, LinkOpened
from tasuki.transfer.receiving_link import ReceivingLink

Emit = Callable[[ReceivingLink, LinkEvent], None]
FIRST_RETRY, LAST_RETRY = 0.1, 5.0  # seconds before a lost link is opened again
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retry:
    """A link that was lost, or did not open, and when to try again."""

    epoch: int  # of the prefill worker
    pause: float  # seconds; doubles with every failure in a row
    at: float
    message: str


class ReceivingLinks:
    def __init__(
        self,
        cache: KVCache,
        connector: Connector,
        settings: LinkSettings,
        host: LinkHost,
        deliver: Callable[[FromEngine], None],
        emit: Emit,
        clock: Clock,
    ) -> None:
        self._cache = cache
        self._connector = connector
        self._settings = settings
        self._host = host
        self._deliver = deliver
        self._emit = emit
        self._clock = clock
        self._targets: dict[str, PrefillTarget] = {}
        self._links: dict[str, ReceivingLink] = {}
        self._retries: dict[str, Retry] = {}  # by worker: the link to it was lost
        self._stale = 0  # of links that are gone

    @property
    def stale(self) -> int:
        """Messages and segments that came too late."""
        return self._stale + sum(link.stale for link in self._links.values())

    def __iter__(self) -> Iterator[ReceivingLink]:
        return iter(self._links.values())

    def know(self, workers: list[PrefillTarget]) -> None:
        """These are the prefill workers now."""
        self._targets = {target.worker_id: target for target in workers}
        for link in list(self._links.values()):
            target = self._targets.get(link.target.worker_id)
            if target is None or target.worker_epoch != link.target.worker_epoch:
                link.close("peer_died")  # it is gone, or has another engine now
        self._retries = {
            worker_id: retry
            for worker_id, retry in self._retries.items()
            if worker_id in self._targets and retry.epoch == self._targets[worker_id].worker_epoch
        }

    def usable(self, candidates: list[PrefillTarget]) -> ReceivingLink | None:
        """The open link to the first candidate that has one, of the epoch the router means."""
        wanted = [(target.worker_id, target.worker_epoch) for target in candidates]
        links = {
            (link.target.worker_id, link.target.worker_epoch): link
            for link in self._links.values()
            if link.state == "open"
        }
        return next((links[key] for key in wanted if key in links), None)

    def receive(self, link_id: str, message: LinkMessage) -> None:
        link = self._links.get(link_id)
        if link is not None:
            link.on_message(message)

    def end(self, link_id: str) -> None:
        """The control stream ended: the prefill worker is gone, or closed it."""
        link = self._links.get(link_id)
        if link is not None:
            link.close("peer_died")

    def tick(self, steps: int, age: float) -> None:
        """Look at deadlines, send heartbeats (`steps` and `age` are the engine's pulse), and open
        the link that has been missing longest, unless one is being opened.
        """
        for link in list(self._links.values()):
            link.expire()
            link.beat(steps, age)
        if any(link.state == "opening" for link in self._links.values()):
            return
        linked = {link.target.worker_id for link in self._links.values()}
        due = [
            (self._retries[worker_id].at if worker_id in self._retries else 0.0, worker_id)
            for worker_id in self._targets
            if worker_id not in linked
        ]
        if due and min(due)[0] <= self._clock():
            self._open(self._targets[min(due)[1]])

    def _open(self, target: PrefillTarget) -> None:
        link_id = secrets.token_hex(16)
        link = ReceivingLink(
            link_id, target, self._cache, self._connector, self._settings, self._host,
            lambda event: self._on_event(link, event), self._clock,
        )  # fmt: skip
        self._links[link_id] = link
        self._deliver(OpenLink(link_id=link_id, target=target))
        link.start()

    def _on_event(self, link: ReceivingLink, event: LinkEvent) -> None:
        if isinstance(event, LinkFailed):
            self._links.pop(link.link_id, None)
            self._stale += link.stale
            self._retry_later(link.target, event)
            self._deliver(CloseLink(link_id=link.link_id, error=None))
        elif isinstance(event, LinkOpened):
            log.info("the link to %s is open", link.target.worker_id)
            self._retries.pop(link.target.worker_id, None)
        self._emit(link, event)

    def _retry_later(self, target: PrefillTarget, event: LinkFailed) -> None:
        """Pauses double with every attempt in a row that failed."""
        last = self._retries.get(target.worker_id)
        pause = FIRST_RETRY
        if last is not None and last.epoch == target.worker_epoch:
            pause = min(2 * last.pause, LAST_RETRY)
        if last is None or last.message != event.message:  # once, not once per attempt
            log.warning("the link to %s was lost: %s", target.worker_id, event.message)
        retry = Retry(target.worker_epoch, pause, self._clock() + pause, event.message)
        self._retries[target.worker_id] = retry

    def reports(self) -> list[LinkReport]:
        live = [
            LinkReport(
                worker_id=link.target.worker_id,
                worker_epoch=link.target.worker_epoch,
                state=link.state,
            )
            for link in self._links.values()
        ]
        linked = {link.worker_id for link in live}
        failed = [
            LinkReport(worker_id=worker_id, worker_epoch=retry.epoch, state="failed")
            for worker_id, retry in self._retries.items()
            if worker_id in self._targets and worker_id not in linked
        ]
        return live + failed

    def close(self) -> None:
        for link in list(self._links.values()):
            link.close("shutdown")
