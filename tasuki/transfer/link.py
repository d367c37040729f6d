"""What both ends of a link share: settings, the host they live in, and a life that ends once.

A link is one control stream and one channel between one decode and one prefill worker. Everything
here runs on the engine's control thread under its lock, except where a comment says otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from tasuki.clock import Clock, monotonic
from tasuki.errors import FenceLostError, TransferError
from tasuki.messages import (
    Heartbeat,
    LayoutDescription,
    LinkClosed,
    LinkMessage,
    Rendezvous,
)
from tasuki.transfer.connector import Channel, ChannelSpec, Connector
from tasuki.transfer.digest import DigestName
from tasuki.transfer.link_events import LinkEvent, LinkFailed
from tasuki.transfer.rendezvous import ControlStreamStore

TOKEN_BYTES = 32
LONGEST_LOOK = 0.5  # seconds; a longer pause between two looks is our own, and no silence of a peer

LinkState = Literal["opening", "open", "failed"]
Emit = Callable[[LinkEvent], None]
"""Takes one event, on the control thread, before the link's method that caused it returns.

It may call the link's methods; the link's own state is complete by then.
"""


class LinkHost(Protocol):
    """What a link needs of the engine around it."""

    def send(self, link_id: str, message: LinkMessage) -> None:
        """Put a message onto the link's control stream, in order. Never blocks, never raises."""

    def call_soon(self, fn: Callable[[], None]) -> None:
        """Run `fn` on the control thread under the lock. Called on any thread; never raises, and
        takes no lock that is held while a link's method runs."""


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    worker_id: str
    worker_epoch: int
    layout: LayoutDescription
    connector: str  # the connector's name, compared in the handshake
    digest: DigestName  # on for the link if either side wants it
    segment_bytes: int = 4 << 20  # at least one block goes into a segment, however small this is
    window_bytes: int = 16 << 20  # announced and not received; what the sender may owe
    open_timeout: float = 10.0  # seconds
    peer_timeout: float = 3.0  # seconds without a word from the peer before it counts as gone
    step_timeout: float = 60.0  # seconds one step of the peer's engine may take
    progress_timeout: float = 5.0  # seconds in which something announced must be received

    @property
    def heartbeat_seconds(self) -> float:
        """Between two heartbeats: several may be late before the peer's patience ends."""
        return self.peer_timeout / 6

    def max_segment_bytes(self, block_bytes: int) -> int:
        return max(self.segment_bytes, block_bytes)


class LinkLife:
    """Opening on a thread of its own, being open, failing exactly once; and the events' way out."""

    def __init__(
        self,
        link_id: str,
        rank: int,
        connector: Connector,
        settings: LinkSettings,
        host: LinkHost,
        emit: Emit,
        clock: Clock,
    ) -> None:
        self.link_id = link_id
        self.state: LinkState = "opening"
        self.channel: Channel | None = None
        self.opened_deadline = clock() + settings.open_timeout
        self._rank = rank
        self._settings = settings
        self._connector = connector
        self._host = host
        self._emit = emit
        self._clock = clock
        self._store = ControlStreamStore(self._publish)
        self._opener: threading.Thread | None = None
        self._events: list[LinkEvent] = []
        self._flushing = False
        self._silence = 0.0  # seconds without a message of the peer, while we were awake
        self._looked = clock()
        self._beat_at = clock()

    def open(
        self, token_out: bytes, token_in: bytes, max_segment_bytes: int, then: Callable[[], None]
    ) -> None:
        """Pair up in the background; `then` runs on the control thread once the channel is up."""
        if self._opener is not None:
            raise TransferError(f"link {self.link_id}: a second handshake came")
        if len(token_in) != TOKEN_BYTES:
            raise TransferError(
                f"link {self.link_id}: a token of {len(token_in)} bytes came; expected 32"
            )
        spec = ChannelSpec(self.link_id, self._rank, token_out, token_in, max_segment_bytes)
        name = f"link-open-{self.link_id[:8]}"
        self._opener = threading.Thread(
            target=self._run_opener, args=(spec, then), name=name, daemon=True
        )
        self._opener.start()

    def deliver(self, message: Rendezvous) -> None:
        self._store.deliver(message.key, message.value)

    def heard(self, message: LinkMessage) -> None:
        """Any message is a sign of life. Raises TransferError when it tells of a wedged engine."""
        self._silence = 0.0
        if isinstance(message, Heartbeat) and message.age > self._settings.step_timeout:
            raise TransferError(
                f"link {self.link_id}: the peer's engine has been in step {message.steps} for "
                f"{message.age:.1f} s; at most {self._settings.step_timeout} s are expected",
                reason="stalled",
            )

    def beat(self, steps: int, age: float) -> None:
        """Send a heartbeat if it is time for one."""
        now = self._clock()
        if self.state == "open" and now >= self._beat_at:
            self._beat_at = now + self._settings.heartbeat_seconds
            self._host.send(self.link_id, Heartbeat(steps=steps, age=age))

    def overdue(self, peer: str) -> TransferError | None:
        """What `peer` should have done by now. Called several times a second."""
        now = self._clock()
        self._silence += min(now - self._looked, LONGEST_LOOK)
        self._looked = now
        if self.state == "opening" and now >= self.opened_deadline:
            return TransferError(
                f"{peer} did not open the link within {self._settings.open_timeout} s"
            )
        if self.state == "open" and self._silence >= self._settings.peer_timeout:
            return TransferError(
                f"{peer} said nothing for {self._settings.peer_timeout} s: stopped, or cut off",
                reason="stalled",
            )
        return None

    def add(self, event: LinkEvent) -> None:
        """Queue an event; `flush` hands it out when the link's state is complete."""
        self._events.append(event)

    def flush(self) -> None:
        """Hand out the queued events in order, also those that a handler's calls add meanwhile."""
        if self._flushing:
            return
        self._flushing = True
        try:
            while self._events:
                self._emit(self._events.pop(0))
        finally:
            self._flushing = False

    def end(
        self, reason: str, message: str, released: Callable[[], frozenset[int]], *, tell: bool
    ) -> None:
        """Fence, tell the peer, queue LinkFailed; only the first call does anything.

        `released` is asked after the fence. Raises FenceLostError: then the process must exit.
        """
        if self.state == "failed":
            return
        self.state = "failed"
        self._store.cancel(message)
        if self.channel is not None:
            self.channel.close()
        if tell:
            self._host.send(self.link_id, LinkClosed(reason=reason))
        self.add(LinkFailed(reason, message, released()))

    def _publish(self, key: str, value: bytes) -> None:  # on the opener thread
        message = Rendezvous(key=key, value=value)
        self._host.call_soon(partial(self._host.send, self.link_id, message))

    def _run_opener(self, spec: ChannelSpec, then: Callable[[], None]) -> None:  # on its thread
        deadline = monotonic() + self.opened_deadline - self._clock()
        opened: Channel | Exception
        try:
            opened = self._connector.open(spec, self._store, deadline)
        except Exception as error:  # nobody else would ever hear of it
            opened = error
        self._host.call_soon(partial(self._finish_open, opened, then))

    def _finish_open(self, opened: Channel | Exception, then: Callable[[], None]) -> None:
        if isinstance(opened, Exception):
            self._fail_open(opened)
        elif self.state != "opening":  # closed meanwhile
            opened.close()
        else:
            self.channel = opened
            self.state = "open"
            then()
        self.flush()

    def _fail_open(self, error: Exception) -> None:
        if isinstance(error, FenceLostError):
            raise error
        self.end("link_down", f"the link did not open: {error}", frozenset, tell=True)
