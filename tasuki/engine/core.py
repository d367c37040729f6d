"""What a role adds to the engine, and what the engine's loop offers to a role.

A role's core takes every decision about streams, handoffs and links; the loop only calls it.
Every call is made under the loop's lock, on the control thread or between two forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tasuki.clock import Clock
from tasuki.messages import (
    DecodeEvent,
    FromEngine,
    LinkMessage,
    LinkSend,
    LoadReport,
    MetricSample,
    MetricSamples,
    PrefillEvent,
    StreamEvent,
    StreamEvents,
    ToEngine,
)
from tasuki.scheduler.output import RequestUpdate
from tasuki.transfer.connector import Connector


@dataclass
class Pulse:
    """How the step thread is doing."""

    steps: int = 0  # that were begun
    began: float | None = None  # when the present one did; None between two

    def age(self, now: float) -> float:
        """For how many seconds the present step has run."""
        return 0.0 if self.began is None else now - self.began


class Recorder:
    """Collects changes of metrics until the next flush; the server process applies them."""

    def __init__(self) -> None:
        self._samples: list[MetricSample] = []
        self._levels: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Add to a counter."""
        self._samples.append(MetricSample(name=name, op="inc", value=value, labels=labels))

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Put one value into a histogram."""
        self._samples.append(MetricSample(name=name, op="observe", value=value, labels=labels))

    def level(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge; said again only when it changed."""
        key = (name, tuple(sorted(labels.items())))
        if self._levels.get(key) != value:
            self._levels[key] = value
            self._samples.append(MetricSample(name=name, op="set", value=value, labels=labels))

    def total(self, name: str, total: float, **labels: str) -> None:
        """Bring a counter up to a running total kept elsewhere."""
        key = (name, tuple(sorted(labels.items())))
        growth = total - self._levels.get(key, 0.0)
        if growth:
            self._levels[key] = total
            self.add(name, growth, **labels)

    def take(self) -> list[MetricSample]:
        samples, self._samples = self._samples, []
        return samples


class Host:
    """The loop as a role's core sees it. It is also the `LinkHost` of the links."""

    def __init__(
        self,
        deliver: Callable[[FromEngine], None],
        call_soon: Callable[[Callable[[], None]], None],
        clock: Clock,
    ) -> None:
        self._deliver = deliver
        self._call_soon = call_soon
        self._events: list[StreamEvent] = []
        self.clock = clock
        self.pulse = Pulse()
        self.metrics = Recorder()

    def emit(self, stream_id: int, event: DecodeEvent | PrefillEvent) -> None:
        """Say something on a stream; everything said in one action leaves in one frame."""
        self._events.append(StreamEvent(stream_id=stream_id, event=event))

    def deliver(self, message: FromEngine) -> None:
        """Send one message to the server process, after what was emitted before it."""
        self.flush_events()
        self._deliver(message)

    def send(self, link_id: str, message: LinkMessage) -> None:
        """Send on a link's control stream."""
        self.deliver(LinkSend(link_id=link_id, message=message))

    def call_soon(self, fn: Callable[[], None]) -> None:
        """Run `fn` on the control thread, under the lock. Any thread may call this."""
        self._call_soon(fn)

    def flush_events(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._deliver(StreamEvents(events=events))

    def flush(self) -> None:
        """Send what was emitted and recorded since the last flush."""
        self.flush_events()
        samples = self.metrics.take()
        if samples:
            self._deliver(MetricSamples(samples=samples))


class WorkerCore(Protocol):
    """A role."""

    connector: Connector  # of its links

    def handle(self, message: ToEngine, now: float) -> None:
        """Take one message. Never raises for what a peer or client did."""

    def advance(self, updates: Sequence[RequestUpdate], now: float) -> None:
        """Take the results of one step."""

    def tick(self, now: float) -> None:
        """Look at deadlines."""

    def report(self, now: float) -> LoadReport: ...

    def live_keys(self) -> Iterator[int]:
        """Requests outside the scheduler that hold blocks."""

    @property
    def is_idle(self) -> bool:
        """Whether no stream is live."""

    def close(self) -> None:
        """Fence all links. Raises FenceLostError when that cannot be promised."""

    def check_integrity(self) -> None: ...
