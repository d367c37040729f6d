"""The links that decode workers opened to this prefill worker. Knows nothing about prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tasuki.clock import Clock
from tasuki.kv.cache import KVCache
from tasuki.messages import CloseLink, ErrorStatus, FromEngine, LinkHello, LinkMessage
from tasuki.transfer.connector import Connector
from tasuki.transfer.link import LinkHost, LinkSettings
from tasuki.transfer.link_events import LinkEvent, LinkFailed
from tasuki.transfer.sending_link import SendingLink

Emit = Callable[[SendingLink, LinkEvent], None]


class SendingLinks:
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
        self._links: dict[str, SendingLink] = {}
        self._stale = 0  # of links that are gone

    @property
    def stale(self) -> int:
        """Messages and calls that came too late."""
        return self._stale + sum(link.stale for link in self._links.values())

    def tick(self, steps: int, age: float) -> None:
        """Look at deadlines and send heartbeats: `steps` and `age` are the engine's pulse."""
        for link in list(self._links.values()):
            link.expire()
            link.beat(steps, age)

    def __iter__(self) -> Iterator[SendingLink]:
        return iter(self._links.values())

    def get(self, link_id: str) -> SendingLink | None:
        return self._links.get(link_id)

    def start(self, link_id: str) -> None:
        """A decode worker opened a control stream."""
        link = SendingLink(
            link_id, self._cache, self._connector, self._settings, self._host,
            lambda event: self._on_event(link, event), self._clock,
        )  # fmt: skip
        self._links[link_id] = link

    def receive(self, link_id: str, message: LinkMessage) -> None:
        link = self._links.get(link_id)
        if link is None:
            return  # it failed meanwhile
        if isinstance(message, LinkHello) and link.accepts(message):
            self._fence_older(link, message.decode_worker_id)
        link.on_message(message)

    def end(self, link_id: str) -> None:
        """The control stream ended: the decode worker is gone, or closed it."""
        link = self._links.get(link_id)
        if link is not None:
            link.close("peer_died")

    def close(self) -> None:
        for link in list(self._links.values()):
            link.close("shutdown")

    def _fence_older(self, newer: SendingLink, decode_worker_id: str) -> None:
        for link in list(self._links.values()):
            if (
                link is not newer
                and link.peer is not None
                and link.peer.worker_id == decode_worker_id
            ):
                link.close("replaced")

    def _on_event(self, link: SendingLink, event: LinkEvent) -> None:
        if isinstance(event, LinkFailed):
            self._links.pop(link.link_id, None)
            self._stale += link.stale
            error = ErrorStatus(
                code="FAILED_PRECONDITION" if event.reason == "layout" else "UNAVAILABLE",
                reason=event.reason,
                message=event.message,
            )
            self._deliver(CloseLink(link_id=link.link_id, error=error))
        self._emit(link, event)
