"""The plain data that crosses a process boundary, and the seam between server and engine.

Knows nothing about sockets, gRPC or tensors. Frames between a worker's server process and its engine
process are MessagePack of these structs; `tasuki.server.wire` turns the ones that also cross machines
into the protobuf messages of `proto/tasuki/v1`. Durations are seconds; sizes are bytes; positions and
block numbers are logical (counted within one prompt): physical block ids never leave a worker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Protocol

import msgspec


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(StrEnum):
    STOP = "stop"  # EOS or a stop token was sampled
    LENGTH = "length"  # max_tokens, or the model's last position
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Base of everything below: immutable, and tagged by its class name on the wire."""


class SamplingParams(Message):
    """How to choose tokens. A pure function of (seed, position, token id) decides: see the sampler."""

    max_tokens: int = 128
    temperature: float = 0.0  # 0 is greedy
    seed: int = 0  # unsigned 64 bits; the router derives one from the request id if unset
    ignore_eos: bool = False


class ErrorStatus(Message):
    """An error as data: `code` is a `tasuki.errors.Code`, `reason` a bounded word for metrics."""

    code: str
    reason: str
    message: str


class PrefillTarget(Message):
    """One prefill worker as a router or a decode worker knows it."""

    worker_id: str
    worker_epoch: int
    address: str  # host:port of its gRPC server


# --- decode: what a router asks of a decode worker, and what comes back -------------------------


class DecodeRequest(Message):
    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]  # what a previous decode worker already gave; empty at first
    sampling: SamplingParams
    prefill_candidates: list[PrefillTarget]  # in order of preference; empty means local
    local_reason: str = ""  # why there are no candidates, as a placement reason
    timeout: float | None = None  # seconds left of the request's own deadline


class DispatchedEvent(Message):
    """The prompt went to a prefill worker."""

    prefill_worker_id: str


class LocalEvent(Message):
    """The decode worker computes the prompt itself; `reason` is a placement reason."""

    reason: str


class FallbackEvent(Message):
    """A prefill worker was named, but the rest of the prompt is computed here after all."""

    reason: str
    kept_tokens: int  # prompt tokens whose KV had already arrived and is kept


class FirstTokenParts(Message):
    """Where the time to the first token went, as far as a decode worker can see. Seconds."""

    reservation: float = 0.0  # request seen -> blocks reserved (split) or queued (local)
    prefill_queue: float = 0.0  # waiting for a step, on whichever worker computed the prompt
    prefill_compute: float = 0.0
    fallback: float = 0.0  # spent on a prefill worker that did not deliver


class TokensEvent(Message):
    """Output tokens that became ready together."""

    index: int  # of the first one among the request's output tokens
    token_ids: list[int]
    offsets: list[float]  # seconds since this worker saw the request, one per token
    parts: FirstTokenParts | None = None  # with index 0 only


class HandoffTimings(Message):
    """What a finished request knows about its handoff; zeros for a local one. Seconds and bytes."""

    transfer: float = 0.0  # first Announce seen -> committed
    exposed_transfer: float = 0.0  # FirstToken seen -> last segment received, if later
    commit_wait: float = 0.0  # last segment received (or FirstToken, if later) -> committed
    first_decode: float = 0.0  # committed (local: first token) -> second token
    nbytes: int = 0
    blocks: int = 0


class FinishedEvent(Message):
    finish_reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int  # prompt tokens found in a prefix cache
    computed_prompt_tokens: int  # prompt tokens this decode worker computed itself
    handoff: HandoffTimings
    preemptions: int = 0


class FailedEvent(Message):
    """The stream ends with this error."""

    error: ErrorStatus


DecodeEvent = (
    DispatchedEvent | LocalEvent | FallbackEvent | TokensEvent | FinishedEvent | FailedEvent
)


# --- prefill: what a decode worker asks of a prefill worker ----------------------------------------


class PrefillRequest(Message):
    request_id: str
    handoff_id: str  # 32 hex digits, new for every attempt
    link_id: str
    prefill_epoch: int  # the caller's idea of both epochs: a mismatch is refused
    decode_worker_id: str
    decode_epoch: int
    prompt_token_ids: list[int]
    first_block: int  # first logical block the decode worker needs
    sampling: SamplingParams
    timeout: float | None = None


class AcceptedEvent(Message):
    queued_tokens: int  # prompt tokens that stand before this one


class ProgressEvent(Message):
    computed_tokens: int


class FirstTokenEvent(Message):
    token_id: int
    finish_reason: FinishReason | None  # set when the first token is also the last
    cached_tokens: int
    queue_seconds: float  # accepted -> first scheduled
    compute_seconds: float  # first scheduled -> first token sampled


class PrefillDoneEvent(Message):
    """Every segment was announced and received; the stream ends well."""


PrefillEvent = AcceptedEvent | ProgressEvent | FirstTokenEvent | PrefillDoneEvent | FailedEvent


# --- link: the control stream of one prefill/decode pair -----------------------------------------


class LayoutDescription(Message):
    """What both ends must agree on before a byte of KV moves; compared field by field."""

    model_id: str
    weights_digest: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    layout_version: str
    numerics: str  # backend, instruction set, dtype: may differ, then "not bit-exact"


class LinkHello(Message):
    """First message from the decode worker, which opens the link."""

    token: bytes  # 32 bytes; the first message on the data connection must equal it
    decode_worker_id: str
    decode_epoch: int
    prefill_worker_id: str
    prefill_epoch: int
    layout: LayoutDescription
    connector: str
    digest: str  # "xxh3" or "none"
    max_segment_bytes: int


class LinkAccept(Message):
    """The prefill worker's answer; a refusal is the end of the stream with an error instead."""

    token: bytes
    layout: LayoutDescription
    digest: str
    max_segment_bytes: int  # the smaller of both


class Rendezvous(Message):
    """One key of the process group's store, carried to the other side."""

    key: str
    value: bytes


class Announce(Message):
    """A debt: exactly one message of `nbytes` follows on the data channel, in `link_seq` order."""

    link_seq: int
    handoff_id: str
    first_block: int  # logical, within the prompt
    count: int
    nbytes: int
    digest: int  # 0 when digests are off


class Posted(Message):
    link_seq: int


class Received(Message):
    link_seq: int
    ok: bool  # False: the digest did not match


class Commit(Message):
    """Follows the last Announce of its handoff."""

    handoff_id: str
    tokens: int  # prompt positions handed over
    blocks: int  # blocks announced


class Abandoned(Message):
    handoff_id: str
    reason: str


class LinkClosed(Message):
    reason: str


class Heartbeat(Message):
    steps: int  # the engine loop's step counter
    age: float  # seconds since it last moved


LinkMessage = (
    LinkHello
    | LinkAccept
    | Rendezvous
    | Announce
    | Posted
    | Received
    | Commit
    | Abandoned
    | LinkClosed
    | Heartbeat
)


# --- state of a worker -------------------------------------------------------------------------


class EngineReady(Message):
    """Sent once, when the engine has loaded and warmed up."""

    worker_epoch: int
    engine_pid: int
    layout: LayoutDescription
    num_blocks: int
    block_bytes: int
    max_model_len: int
    vocab_size: int
    facts: dict[str, str]  # what was chosen at start: linears, attention, threads, memory


class EngineFailed(Message):
    """Sent instead of EngineReady when the engine cannot start, and before a deliberate exit."""

    error: ErrorStatus


class LinkReport(Message):
    worker_id: str
    worker_epoch: int
    state: str  # opening | open | failed


class LoadReport(Message):
    """A worker's state, a few times a second."""

    worker_id: str
    worker_epoch: int
    role: Role
    ready: bool
    draining: bool
    free_blocks: int
    total_blocks: int
    queued_tokens: int  # prompt tokens accepted and not yet computed
    running: int
    waiting: int
    prefill_tokens_per_second: float  # measured, 0 before the first measurement
    links: list[LinkReport]


class MetricSample(Message):
    """One change of one metric, recorded in the engine and applied in the server process."""

    name: str  # without the `tasuki_` prefix
    op: str  # "inc" | "set" | "observe"
    value: float
    labels: dict[str, str]


# --- frames between the server process and the engine process -----------------------------------


class StartDecode(Message):
    stream_id: int
    request: DecodeRequest


class StartPrefill(Message):
    stream_id: int
    request: PrefillRequest


class CancelStream(Message):
    """The caller of a stream went away, or its deadline passed. Unknown ids are ignored."""

    stream_id: int
    reason: FinishReason


class KnownPrefillWorkers(Message):
    """The union of what all connected routers name; a decode worker opens links to these."""

    workers: list[PrefillTarget]


class PrefillReply(Message):
    """One event of a Prefill call that this engine asked for."""

    handoff_id: str
    event: PrefillEvent


class PrefillCallEnded(Message):
    """The Prefill call is over for whatever reason; `error` is None when it ended well."""

    handoff_id: str
    error: ErrorStatus | None


class LinkStarted(Message):
    """A decode worker opened a link's control stream to this prefill worker."""

    link_id: str


class LinkReceived(Message):
    link_id: str
    message: LinkMessage


class LinkEnded(Message):
    """The control stream ended; the other side is gone or closed it."""

    link_id: str
    error: ErrorStatus | None


class BeginDrain(Message):
    """Take no new work; finish what runs."""


class Shutdown(Message):
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
    | Shutdown
)


class StreamEvent(Message):
    """One event for one Decode or Prefill stream. Finished, Failed and PrefillDone end it."""

    stream_id: int
    event: DecodeEvent | AcceptedEvent | ProgressEvent | FirstTokenEvent | PrefillDoneEvent


class StreamEvents(Message):
    """Everything one step (or one control action) has to say: one frame, one wake-up."""

    events: list[StreamEvent]


class CallPrefill(Message):
    """Ask the server to open a Prefill call; replies come as PrefillReply."""

    target: PrefillTarget
    request: PrefillRequest


class CancelPrefillCall(Message):
    handoff_id: str


class OpenLink(Message):
    """Ask the server to open a control stream; the engine's LinkHello follows as LinkSend."""

    link_id: str
    target: PrefillTarget


class LinkSend(Message):
    link_id: str
    message: LinkMessage


class CloseLink(Message):
    """End the control stream from this side."""

    link_id: str
    error: ErrorStatus | None


class MetricSamples(Message):
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
