"""What a server process and its engine process say to each other, and the seam between them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from tasuki.messages.base import ErrorStatus, FinishReason, Message, PrefillTarget
from tasuki.messages.command import (
    CaptureProfile,
    FaultInjected,
    InjectFault,
    PrefixCacheReset,
    ProfileCaptured,
    ResetPrefixCache,
)
from tasuki.messages.decode import DecodeEvent, DecodeRequest
from tasuki.messages.link import LinkMessage
from tasuki.messages.prefill import (
    AcceptedEvent,
    FirstTokenEvent,
    PrefillDoneEvent,
    PrefillEvent,
    PrefillRequest,
    ProgressEvent,
)
from tasuki.messages.state import EngineFailed, EngineReady, LoadReport, MetricSample


class StartDecode(Message, frozen=True):
    stream_id: int
    request: DecodeRequest


class StartPrefill(Message, frozen=True):
    stream_id: int
    request: PrefillRequest


class CancelStream(Message, frozen=True):
    """The caller of a stream went away, or its deadline passed. Unknown ids are ignored."""

    stream_id: int
    reason: FinishReason


class KnownPrefillWorkers(Message, frozen=True):
    """The union of what all connected routers name; a decode worker opens links to these."""

    workers: list[PrefillTarget]


class PrefillReply(Message, frozen=True):
    """One event of a Prefill call that this engine asked for."""

    handoff_id: str
    event: PrefillEvent


class PrefillCallEnded(Message, frozen=True):
    """The Prefill call is over for whatever reason; `error` is None when it ended well."""

    handoff_id: str
    error: ErrorStatus | None


class LinkStarted(Message, frozen=True):
    """A decode worker opened a link's control stream to this prefill worker."""

    link_id: str


class LinkReceived(Message, frozen=True):
    link_id: str
    message: LinkMessage


class LinkEnded(Message, frozen=True):
    """The control stream ended; the other side is gone or closed it."""

    link_id: str
    error: ErrorStatus | None


class BeginDrain(Message, frozen=True):
    """Take no new work; finish what runs."""


class Shutdown(Message, frozen=True):
    """Close links, stop the loop, exit 0."""


ToEngine = (
    StartDecode
    | StartPrefill
    | CancelStream
    | KnownPrefillWorkers
    | PrefillReply
    | PrefillCallEnded
    | LinkStarted
    | LinkReceived
    | LinkEnded
    | BeginDrain
    | ResetPrefixCache
    | CaptureProfile
    | InjectFault
    | Shutdown
)


class StreamEvent(Message, frozen=True):
    """One event for one Decode or Prefill stream. Finished, Failed and PrefillDone end it."""

    stream_id: int
    event: DecodeEvent | AcceptedEvent | ProgressEvent | FirstTokenEvent | PrefillDoneEvent


class StreamEvents(Message, frozen=True):
    """Everything one step (or one control action) has to say: one frame, one wake-up."""

    events: list[StreamEvent]


class CallPrefill(Message, frozen=True):
    """Ask the server to open a Prefill call; replies come as PrefillReply."""

    target: PrefillTarget
    request: PrefillRequest


class CancelPrefillCall(Message, frozen=True):
    handoff_id: str


class OpenLink(Message, frozen=True):
    """Ask the server to open a control stream; the engine's LinkHello follows as LinkSend."""

    link_id: str
    target: PrefillTarget


class LinkSend(Message, frozen=True):
    link_id: str
    message: LinkMessage


class CloseLink(Message, frozen=True):
    """End the control stream from this side."""

    link_id: str
    error: ErrorStatus | None


class MetricSamples(Message, frozen=True):
    samples: list[MetricSample]


FromEngine = (
    EngineReady
    | EngineFailed
    | StreamEvents
    | CallPrefill
    | CancelPrefillCall
    | OpenLink
    | LinkSend
    | CloseLink
    | LoadReport
    | MetricSamples
    | PrefixCacheReset
    | ProfileCaptured
    | FaultInjected
)


class EngineClient(Protocol):
    """The seam: how a server process talks to its engine, be it a process or a thread.

    One event loop uses it. `send` never blocks and never raises for a dead engine; the end of
    `receive` is how the death of an engine is seen.
    """

    async def start(self) -> EngineReady:
        """Start the engine and wait until it is warm. Raises what the engine's start raised."""

    def send(self, message: ToEngine) -> None:
        """Queue one message for the engine, in order."""

    def receive(self) -> AsyncIterator[FromEngine]:
        """Messages from the engine, in order; ends when the engine has ended."""

    async def close(self) -> None:
        """Shut the engine down, by force after a deadline, and return its resources."""
