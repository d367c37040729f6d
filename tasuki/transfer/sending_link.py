"""The prefill side's end of a link: answers the handshake, announces offered blocks, sends them.

An Announce is a debt: its message is sent even if the handoff ends meanwhile. Knows no requests and
owns no blocks; a handoff's blocks stay untouched until HandoffDrained or LinkFailed.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tasuki.clock import Clock
from tasuki.errors import FenceLostError, TransferError
from tasuki.kv.cache import KVCache
from tasuki.messages import (
    Abandoned,
    Announce,
    Commit,
    Heartbeat,
    LinkAccept,
    LinkClosed,
    LinkHello,
    LinkMessage,
    Posted,
    Received,
    Rendezvous,
)
from tasuki.reasons import AbandonReason
from tasuki.transfer.connector import Connector
from tasuki.transfer.digest import Digest, digest_named, negotiate, no_digest
from tasuki.transfer.hello import require_acceptable
from tasuki.transfer.link import TOKEN_BYTES, Emit, LinkHost, LinkLife, LinkSettings, LinkState
from tasuki.transfer.link_events import HandoffDrained, LinkOpened, SegmentSent
from tasuki.transfer.outgoing_handoff import OutgoingHandoff
from tasuki.transfer.outgoing_segment import OutgoingSegment
from tasuki.transfer.send_queue import OfferedRun, SendQueue
from tasuki.transfer.staging import SegmentMemory, StagingRing


@dataclass(frozen=True)
class LinkPeer:
    """The decode worker at the other end."""

    worker_id: str
    worker_epoch: int


class SendingLink:
    def __init__(
        self,
        link_id: str,
        cache: KVCache,
        connector: Connector,
        settings: LinkSettings,
        host: LinkHost,
        emit: Emit,
        clock: Clock,
    ) -> None:
        self.link_id = link_id
        self.peer: LinkPeer | None = None  # known once its LinkHello was seen
        self.stale = 0  # calls and messages that came after an end
        self._cache = cache
        self._settings = settings
        self._host = host
        self._clock = clock
        self._life = LinkLife(link_id, 0, connector, settings, host, emit, clock)
        self._block_bytes = cache.layout.block_bytes
        self._max_segment = settings.max_segment_bytes(self._block_bytes)
        self._digest: Digest = no_digest
        self._bit_exact = True
        self._handoffs: dict[str, OutgoingHandoff] = {}
        self._segments: dict[int, OutgoingSegment] = {}
        self._unreceived = 0  # bytes announced and not received: the window
        self._next_seq = 0
        self._next_posted = 0
        self._next_received = 0
        self._queue = SendQueue(self._block_bytes, self._max_segment)
        self._ring: StagingRing | None = None
        self._in_place = True

    @property
    def state(self) -> LinkState:
        return self._life.state

    @property
    def opened_deadline(self) -> float:
        return self._life.opened_deadline

    @property
    def unreceived_bytes(self) -> int:
        """Announced and not received; at most the window, or one segment if that is larger."""
        return self._unreceived

    def accepts(self, hello: LinkHello) -> bool:
        """Whether this is a first hello that will not be refused."""
        try:
            require_acceptable(hello, self._settings, self._block_bytes)
        except TransferError:
            return False
        return self.peer is None

    def begin(self, handoff_id: str, first_block: int, num_blocks: int) -> None:
        """A prompt whose blocks will be offered. Raises TransferError: no live link, or id in use.

        Allowed while the link opens: the peer may know a moment earlier that it is open, and ask.
        """
        if self.state == "failed" or self.peer is None:
            raise TransferError(f"link {self.link_id} is {self.state}; it carries no handoff")
        if handoff_id in self._handoffs:
            raise TransferError(
                f"handoff {handoff_id} is under way already; every attempt needs a new id"
            )
        timeout = self._settings.progress_timeout
        self._handoffs[handoff_id] = OutgoingHandoff(
            handoff_id, first_block, num_blocks, now=self._clock(), progress_timeout=timeout
        )

    def offer(self, handoff_id: str, first_block: int, block_ids: Sequence[int]) -> None:
        """Logically consecutive blocks that are complete and will never be written again.

        Late offers (the handoff or the link ended) are counted and dropped.
        """
        handoff = self._handoffs.get(handoff_id)
        if handoff is None:
            self.stale += 1
            return
        if handoff.offer(first_block, len(block_ids)):
            self._queue.add(handoff_id, first_block, block_ids)
            self._pump()
        else:
            self.stale += 1
        self._life.flush()

    def commit(self, handoff_id: str, tokens: int) -> None:
        """No more offers; Commit goes right after the last Announce. Late calls are dropped."""
        handoff = self._handoffs.get(handoff_id)
        if handoff is None or not handoff.commit(tokens):
            self.stale += 1
            return
        self._advance(handoff)
        self._life.flush()

    def abandon(self, handoff_id: str, reason: AbandonReason) -> None:
        """Announce nothing more. The peer is told unless it already has the Commit."""
        handoff = self._handoffs.get(handoff_id)
        if handoff is None or not handoff.abandon(reason, self._clock()):
            self.stale += 1
            return
        self._queue.drop(handoff_id)
        self._host.send(self.link_id, Abandoned(handoff_id=handoff_id, reason=str(reason)))
        self._advance(handoff)
        self._life.flush()

    def outstanding(self, handoff_id: str) -> int:
        """Blocks of this handoff that are announced and not received."""
        handoff = self._handoffs.get(handoff_id)
        return 0 if handoff is None else handoff.outstanding

    def expire(self) -> None:
        """Fail if the peer did not open in time, fell silent or stopped receiving; called often."""
        late = self._life.overdue("a decode worker" if self.peer is None else self.peer.worker_id)
        if late is not None:
            self._fail(late.reason, late.message)
        stalled = [h.awaited for h in self._handoffs.values() if h.stalled(self._clock())]
        if stalled:
            self._fail("stalled", f"the peer did not receive {stalled[0]}")
        self._life.flush()

    def beat(self, steps: int, age: float) -> None:
        """Let the peer know, now and then, how the engine here is: its step counter, and for how
        many seconds the present step has run.
        """
        self._life.beat(steps, age)

    def close(self, reason: str, message: str = "") -> None:
        """Fence, then tell the peer; emits LinkFailed exactly once. Raises FenceLostError."""
        self._fail(reason, message or f"this side closed the link: {reason}")
        self._life.flush()

    def on_message(self, message: LinkMessage) -> None:
        """One message of the control stream, in order. A violation closes the link."""
        if self.state == "failed":
            self.stale += 1
            return
        try:
            self._life.heard(message)
            self._dispatch(message)
        except FenceLostError:
            raise
        except TransferError as error:
            # A refused hello is answered by the status that ends the control stream.
            self._fail(error.reason, error.message, tell=self.peer is not None)
        self._life.flush()

    def check_integrity(self) -> None:
        for handoff in self._handoffs.values():
            handoff.check_integrity()
            assert not handoff.drained
            pending = handoff.offered - handoff.announced
            assert self._queue.pending(handoff.handoff_id) == (0 if handoff.is_over else pending)
        waiting = [s for s in self._segments.values() if not s.received]
        assert self._unreceived == sum(s.nbytes for s in waiting)
        limit = max(self._settings.window_bytes, self._max_segment)
        assert self._unreceived <= limit
        blocks = sum(len(s.run.block_ids) for s in self._segments.values())
        assert blocks == sum(h.outstanding for h in self._handoffs.values())
        if self._ring is not None:
            self._ring.check_integrity()
            assert self._ring.in_use == sum(s.staging is not None for s in self._segments.values())

    def _dispatch(self, message: LinkMessage) -> None:
        match message:
            case LinkHello():
                self._on_hello(message)
            case Rendezvous():
                self._life.deliver(message)
            case Posted():
                self._on_posted(message.link_seq)
            case Received():
                self._on_received(message.link_seq, message.ok)
            case LinkClosed():
                why = "stalled" if message.reason == "stalled" else "link_down"
                self._fail(why, f"the peer closed the link: {message.reason}", tell=False)
            case Heartbeat():
                pass  # it was heard
            case _:
                raise TransferError(f"a decode worker sent {type(message).__name__}")

    def _on_hello(self, hello: LinkHello) -> None:
        if self.peer is not None:
            raise TransferError(f"link {self.link_id}: a second hello came")
        settings = self._settings
        require_acceptable(hello, settings, self._block_bytes)
        digest = negotiate(settings.digest, hello.digest)
        self._digest = digest_named(digest)
        self._max_segment = min(self._max_segment, hello.max_segment_bytes)
        self._queue = SendQueue(self._block_bytes, self._max_segment)
        self._bit_exact = hello.layout.numerics == settings.layout.numerics
        token = secrets.token_bytes(TOKEN_BYTES)
        self._life.open(token, hello.token, self._max_segment, self._opened)
        self.peer = LinkPeer(hello.decode_worker_id, hello.decode_epoch)
        accept = LinkAccept(
            token=token,
            layout=settings.layout,
            digest=digest,
            max_segment_bytes=self._max_segment,
        )
        self._host.send(self.link_id, accept)

    def _opened(self) -> None:
        assert self._life.channel is not None
        memory = SegmentMemory(self._life.channel.device, self._cache.device)
        self._in_place = memory.in_place
        self._ring = StagingRing(self._settings.window_bytes + self._max_segment, memory)
        self._life.add(LinkOpened(self._bit_exact))
        self._pump()

    def _pump(self) -> None:
        """Announce while the window has room; at least one segment always fits."""
        while self.state == "open" and (run := self._queue.next_run()) is not None:
            nbytes = len(run.block_ids) * self._block_bytes
            if self._unreceived and self._unreceived + nbytes > self._settings.window_bytes:
                return
            segment = self._gather(run, nbytes)
            if segment is None:
                return  # no staging buffer now; the next settled segment returns one
            self._queue.take(run)
            self._announce(segment)

    def _gather(self, run: OfferedRun, nbytes: int) -> OutgoingSegment | None:
        if run.is_contiguous and self._in_place:
            view = self._cache.block_bytes_view(run.block_ids[0], len(run.block_ids))
            return OutgoingSegment(run, nbytes, view, None)
        assert self._ring is not None
        staging = self._ring.take(nbytes)
        if staging is None:
            return None
        self._cache.read_blocks(run.block_ids, staging.view)
        return OutgoingSegment(run, nbytes, staging.view, staging)

    def _announce(self, segment: OutgoingSegment) -> None:
        run, seq = segment.run, self._next_seq
        handoff = self._handoffs[run.handoff_id]
        self._next_seq += 1
        self._segments[seq] = segment
        self._unreceived += segment.nbytes
        handoff.announce(len(run.block_ids), self._clock())
        announce = Announce(
            link_seq=seq,
            handoff_id=run.handoff_id,
            first_block=run.first_block,
            count=len(run.block_ids),
            nbytes=segment.nbytes,
            digest=self._digest(segment.view),
        )
        self._host.send(self.link_id, announce)
        assert self._life.channel is not None
        if not self._life.channel.needs_posted:
            self._launch(seq, segment)
        self._advance(handoff)

    def _launch(self, seq: int, segment: OutgoingSegment) -> None:
        assert self._life.channel is not None
        self._life.channel.send(segment.view, partial(self._completed, seq))

    def _on_posted(self, seq: int) -> None:
        segment = self._segments.get(seq)
        if segment is None or seq != self._next_posted:
            raise TransferError(f"Posted {seq} came; expected {self._next_posted}")
        self._next_posted += 1
        segment.posted = True
        assert self._life.channel is not None
        if self._life.channel.needs_posted:
            self._launch(seq, segment)

    def _on_received(self, seq: int, ok: bool) -> None:
        segment = self._segments.get(seq)
        if segment is None or not segment.posted or seq != self._next_received:
            raise TransferError(f"Received {seq} came; expected {self._next_received}")
        if not ok:
            raise TransferError(f"segment {seq} arrived damaged at the peer", reason="digest")
        self._next_received += 1
        segment.received = True
        self._unreceived -= segment.nbytes
        for handoff in self._handoffs.values():
            handoff.progress(self._clock())
        self._settle(seq, segment)

    def _completed(self, seq: int, error: TransferError | None) -> None:  # on a completion thread
        self._host.call_soon(partial(self._sent, seq, error))

    def _sent(self, seq: int, error: TransferError | None) -> None:
        if self.state != "open":
            return  # the fence failed it
        if error is not None:
            self._fail("link_down", f"segment {seq} was not sent: {error}")
        else:
            segment = self._segments[seq]
            segment.sent = True
            self._settle(seq, segment)
        self._life.flush()

    def _settle(self, seq: int, segment: OutgoingSegment) -> None:
        """Received may be seen before the send's own completion; memory is read until both."""
        if segment.sent and segment.received:
            del self._segments[seq]
            if segment.staging is not None:
                segment.staging.release()
            run = segment.run
            handoff = self._handoffs[run.handoff_id]
            handoff.receive(len(run.block_ids), self._clock())
            count = len(run.block_ids)
            self._life.add(SegmentSent(run.handoff_id, run.first_block, count, segment.nbytes))
            self._advance(handoff)
        self._pump()

    def _advance(self, handoff: OutgoingHandoff) -> None:
        if handoff.ready_to_commit:
            assert handoff.tokens is not None
            handoff.finish_commit(self._clock())
            commit = Commit(
                handoff_id=handoff.handoff_id, tokens=handoff.tokens, blocks=handoff.announced
            )
            self._host.send(self.link_id, commit)
        if handoff.drained and self._handoffs.pop(handoff.handoff_id, None) is not None:
            self._queue.drop(handoff.handoff_id)
            self._life.add(HandoffDrained(handoff.handoff_id))

    def _fail(self, reason: str, message: str, *, tell: bool = True) -> None:
        self._life.end(reason, message, self._forget_all, tell=tell)

    def _forget_all(self) -> frozenset[int]:
        for segment in self._segments.values():
            if segment.staging is not None:
                segment.staging.release()
        self._segments.clear()
        self._handoffs.clear()
        self._queue = SendQueue(self._block_bytes, self._max_segment)
        self._unreceived = 0
        return frozenset()
