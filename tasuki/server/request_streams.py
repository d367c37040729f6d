"""The live Decode and Prefill streams of a worker's server process.

Carries events from the engine's frames to the calls that wait for them, and tells the engine when a
caller went away. Knows nothing about gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import msgspec

from tasuki.errors import TasukiError
from tasuki.messages import (
    CancelStream,
    DecodeEvent,
    FailedEvent,
    FinishedEvent,
    FinishReason,
    PrefillDoneEvent,
    PrefillEvent,
    StreamEvent,
    StreamEvents,
    ToEngine,
    TokensEvent,
)
from tasuki.server.mailbox import Mailbox
from tasuki.server.status import to_error_status

AnyEvent: TypeAlias = DecodeEvent | PrefillEvent


def is_last(event: AnyEvent) -> bool:
    """Whether its stream ends with it."""
    if isinstance(event, FinishedEvent):
        return event.samples_left == 0
    return isinstance(event, FailedEvent | PrefillDoneEvent)


class RequestStream:
    """One stream: the engine's events in, for one call."""

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self.ended = False  # the engine said its last word on it
        self.end_reason = FinishReason.CANCELLED  # what the engine hears if the caller ends it
        self._events: Mailbox[AnyEvent] = Mailbox()

    def put(self, events: Sequence[AnyEvent]) -> None:
        """Add events; what comes after the last one is dropped."""
        for count, event in enumerate(events, 1):
            if is_last(event):
                self.ended = True
                events = events[:count]
                break
        self._events.put(events)

    async def take(self) -> list[AnyEvent]:
        """Wait for events; those a slow caller let pile up come merged."""
        return merge_tokens(await self._events.take())


class RequestStreams:
    """All of them, by an id that this process never uses twice."""

    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self._send = send
        self._streams: dict[int, RequestStream] = {}
        self._next_id = 1
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._streams)

    @contextmanager
    def open(self, start: Callable[[int], ToEngine]) -> Iterator[RequestStream]:
        """Start a stream with the message that `start` makes of its id, and end it on every path:
        the engine hears CancelStream unless it ended the stream itself.
        """
        stream = RequestStream(self._next_id)
        self._next_id += 1
        self._streams[stream.stream_id] = stream
        self._idle.clear()
        self._send(start(stream.stream_id))
        try:
            yield stream
        finally:
            del self._streams[stream.stream_id]
            if not self._streams:
                self._idle.set()
            if not stream.ended:
                reason = stream.end_reason
                self._send(CancelStream(stream_id=stream.stream_id, reason=reason))

    async def wait_idle(self) -> None:
        """Wait until no stream is live."""
        await self._idle.wait()

    def deliver(self, frame: StreamEvents) -> None:
        """Hand one frame out: one wake-up per stream. Streams that are gone are skipped."""
        for stream_id, events in _by_stream(frame.events).items():
            stream = self._streams.get(stream_id)
            if stream is not None and not stream.ended:
                stream.put(events)

    def fail_all(self, error: TasukiError) -> None:
        """End every live stream with an error, after what it was already given."""
        for stream in self._streams.values():
            if not stream.ended:
                stream.put([FailedEvent(error=to_error_status(error))])


def _by_stream(events: Sequence[StreamEvent]) -> dict[int, list[AnyEvent]]:
    grouped: dict[int, list[AnyEvent]] = {}
    for item in events:
        grouped.setdefault(item.stream_id, []).append(item.event)
    return grouped


def merge_tokens(events: Sequence[AnyEvent]) -> list[AnyEvent]:
    """Join token events of a sample: tokens that are ready together travel in one message."""
    merged: list[AnyEvent] = []
    place: dict[int, int] = {}  # in `merged`, by sample: where its next tokens can be added
    for event in events:
        if not isinstance(event, TokensEvent):
            place.clear()
        elif event.sample_index in place:
            at = place[event.sample_index]
            merged[at] = _joined(merged[at], event)
            continue
        else:
            place[event.sample_index] = len(merged)
        merged.append(event)
    return merged


def _joined(first: AnyEvent, second: TokensEvent) -> TokensEvent:
    assert isinstance(first, TokensEvent)
    return msgspec.structs.replace(  # all else belongs to the first of them
        first,
        token_ids=first.token_ids + second.token_ids,
        offsets=first.offsets + second.offsets,
        logprobs=first.logprobs + second.logprobs,
    )
