"""The decode side's end of a link: opens it, posts a receive for every Announce, lands the blocks.

A receive is never withheld: announced segments of handoffs that are gone land in a scratch buffer.
Drives the Handoffs registered with it; decides nothing about requests and owns no blocks.

The life of a segment here:
1. Announce: size, order and range are checked; a violation closes the link before any post.
2. A receive is posted into the cache (blocks side by side), a staging buffer (blocks apart, or
   the cache where the channel cannot reach), or scratch (stale).
3. Posted goes back, once the receive was launched where that matters.
4. The bytes arrive; the completion thread checks their digest.
5. The control thread copies staged blocks into place, tells the handoff, sends Received.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tasuki.clock import Clock
from tasuki.errors import FenceLostError, TransferError
from tasuki.kv.cache import KVCache
from tasuki.kv.layout import require_same_layout
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
    PrefillTarget,
    Received,
    Rendezvous,
)
from tasuki.reasons import AbandonReason
from tasuki.transfer.block_run import is_run
from tasuki.transfer.connector import Connector
from tasuki.transfer.digest import Digest, digest_named, no_digest
from tasuki.transfer.handoff import Handoff
from tasuki.transfer.link import TOKEN_BYTES, Emit, LinkHost, LinkLife, LinkSettings, LinkState
from tasuki.transfer.link_events import (
    BlocksReleased,
    CommitSeen,
    DigestMismatch,
    LinkOpened,
    PeerAbandoned,
    SegmentAnnounced,
    SegmentReceived,
)
from tasuki.transfer.staging import SegmentMemory, Staging, StagingRing


@dataclass(eq=False)
class IncomingSegment:
    """One announced message whose bytes are not here yet."""

    announce: Announce
    handoff: Handoff | None  # None: stale, or abandoned meanwhile
    block_ids: tuple[int, ...]  # physical; empty for a stale one
    staging: Staging | None


@dataclass(frozen=True, eq=False)
class Expected:
    handoff: Handoff
    block_ids: tuple[int, ...]  # physical block of each needed logical block


class ReceivingLink:
    def __init__(
        self,
        link_id: str,
        target: PrefillTarget,
        cache: KVCache,
        connector: Connector,
        settings: LinkSettings,
        host: LinkHost,
        emit: Emit,
        clock: Clock,
    ) -> None:
        self.link_id = link_id
        self.target = target
        self.stale = 0  # messages and segments of handoffs that are gone
        self._cache = cache
        self._settings = settings
        self._host = host
        self._clock = clock
        self._life = LinkLife(link_id, 1, connector, settings, host, emit, clock)
        self._block_bytes = cache.layout.block_bytes
        self._max_segment = settings.max_segment_bytes(self._block_bytes)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._digest: Digest = no_digest
        self._bit_exact = True
        self._started = False
        self._next_seq = 0
        self._segments: dict[int, IncomingSegment] = {}
        self._handoffs: dict[str, Expected] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._ring: StagingRing | None = None
        self._memory = SegmentMemory()

    @property
    def state(self) -> LinkState:
        return self._life.state

    @property
    def opened_deadline(self) -> float:
        return self._life.opened_deadline

    def start(self) -> None:
        """Say hello. The role has opened the control stream."""
        assert not self._started
        self._started = True
        hello = LinkHello(
            token=self._token,
            decode_worker_id=self._settings.worker_id,
            decode_epoch=self._settings.worker_epoch,
            prefill_worker_id=self.target.worker_id,
            prefill_epoch=self.target.worker_epoch,
            layout=self._settings.layout,
            connector=self._settings.connector,
            digest=self._settings.digest,
            max_segment_bytes=self._max_segment,
        )
        self._host.send(self.link_id, hello)

    def expire(self) -> None:
        """Fail if the peer did not open in time, or fell silent; called now and then."""
        late = self._life.overdue(self.target.worker_id)
        if late is not None:
            self._fail(late.reason, late.message)
        self._life.flush()

    def beat(self, steps: int, age: float) -> None:
        """Let the peer know, now and then, how the engine here is: its step counter, and for how
        many seconds the present step has run.
        """
        self._life.beat(steps, age)

    def expect(self, handoff: Handoff, block_ids: Sequence[int]) -> None:
        """Land the handoff's segments: `block_ids[i]` is logical block `first_block + i`.

        Call before the prefill worker is asked. Raises TransferError unless the link is open.
        """
        if self.state != "open":
            raise TransferError(f"link {self.link_id} to {self.target.worker_id} is {self.state}")
        if len(block_ids) != handoff.num_blocks or len(set(block_ids)) != len(block_ids):
            raise ValueError(f"{len(block_ids)} block ids for {handoff.num_blocks} blocks")
        assert handoff.handoff_id not in self._handoffs, "handoff ids are new for every attempt"
        self._handoffs[handoff.handoff_id] = Expected(handoff, tuple(block_ids))

    def abandon(self, handoff_id: str, reason: AbandonReason) -> frozenset[int]:
        """Give a handoff up. Returns the physical blocks that a posted receive may still write.

        The caller quarantines these until BlocksReleased or LinkFailed names them; all others are
        free at once. Unknown ids return the empty set.
        """
        expected = self._handoffs.pop(handoff_id, None)
        if expected is None:
            return frozenset()
        expected.handoff.abandon(reason, self._clock())
        posted: set[int] = set()
        for segment in self._segments.values():
            if segment.handoff is expected.handoff:
                segment.handoff = None
                posted.update(segment.block_ids)
        return frozenset(posted)

    def forget(self, handoff_id: str) -> None:
        """The handoff is committed: nothing more comes. Unknown ids are ignored."""
        expected = self._handoffs.pop(handoff_id, None)
        assert expected is None or expected.handoff.is_committed, "abandon it instead"

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
            self._fail(error.reason, error.message)
        self._life.flush()

    def check_integrity(self) -> None:
        for key, expected in self._handoffs.items():
            assert key == expected.handoff.handoff_id
            expected.handoff.check_integrity()
        staged = [s.staging for s in self._segments.values() if s.staging is not None]
        assert not any(staging.released for staging in staged)
        if self._ring is not None:
            self._ring.check_integrity()
            assert self._ring.in_use <= len(staged)
        if self.state == "failed":
            assert not self._segments
        if self.state == "open":
            assert sorted(self._segments) == list(self._segments)
            assert all(seq < self._next_seq for seq in self._segments)

    def _dispatch(self, message: LinkMessage) -> None:
        match message:
            case Announce() | Commit() | Abandoned():
                if self.state != "open":  # no handoff can be under way
                    raise TransferError(f"{type(message).__name__} came before the link was open")
                self._on_handoff_message(message)
            case Rendezvous():
                self._life.deliver(message)
            case LinkAccept():
                self._on_accept(message)
            case LinkClosed():
                why = "stalled" if message.reason == "stalled" else "link_down"
                self._fail(why, f"the peer closed the link: {message.reason}", tell=False)
            case Heartbeat():
                pass  # it was heard
            case _:
                raise TransferError(f"a prefill worker sent {type(message).__name__}")

    def _on_handoff_message(self, message: Announce | Commit | Abandoned) -> None:
        expected = self._handoffs.get(message.handoff_id)
        match message:
            case Announce():
                self._on_announce(message, expected)
            case _ if expected is None:
                self.stale += 1
            case Commit():
                if expected.handoff.commit(message.tokens, message.blocks, self._clock()):
                    self._life.add(CommitSeen(message.handoff_id))
            case Abandoned():
                self._life.add(PeerAbandoned(message.handoff_id, message.reason))

    def _on_accept(self, accept: LinkAccept) -> None:
        require_same_layout(self._settings.layout, accept.layout)
        if self._settings.digest == "xxh3" and accept.digest != "xxh3":
            raise TransferError(f"the peer turned digests off: {accept.digest!r}", reason="refused")
        if not self._block_bytes <= accept.max_segment_bytes <= self._max_segment:
            raise TransferError(
                f"the peer wants segments of {accept.max_segment_bytes} bytes; expected "
                f"{self._block_bytes} to {self._max_segment}",
                reason="refused",
            )
        self._digest = digest_named(accept.digest)
        self._max_segment = accept.max_segment_bytes
        self._bit_exact = accept.layout.numerics == self._settings.layout.numerics
        self._life.open(self._token, accept.token, self._max_segment, self._opened)

    def _opened(self) -> None:
        assert self._life.channel is not None
        device = self._life.channel.device
        self._memory = SegmentMemory(device, self._cache.device)
        self._scratch = torch.empty(self._max_segment, dtype=torch.uint8, device=device)
        self._ring = StagingRing(self._settings.window_bytes + self._max_segment, self._memory)
        self._life.add(LinkOpened(self._bit_exact))

    def _on_announce(self, announce: Announce, expected: Expected | None) -> None:
        self._check_announce(announce)
        first, count = announce.first_block, announce.count
        if expected is not None and expected.handoff.announce(first, count, self._clock()):
            offset = first - expected.handoff.first_block
            block_ids = expected.block_ids[offset : offset + count]
            segment = IncomingSegment(announce, expected.handoff, block_ids, None)
            view = self._landing(segment)
            self._life.add(SegmentAnnounced(announce.handoff_id, first, count))
        else:
            self.stale += 1
            segment = IncomingSegment(announce, None, (), None)
            view = self._scratch[: announce.nbytes]
        self._next_seq += 1
        self._segments[announce.link_seq] = segment
        # Scratch is shared by all stale segments in flight, so their digests mean nothing.
        digest = no_digest if not segment.block_ids else self._digest
        wanted = announce.digest if segment.block_ids else 0
        assert self._life.channel is not None
        done = partial(self._completed, announce.link_seq, view, digest, wanted)
        if self._life.channel.needs_posted:
            launched = partial(self._posted, announce.link_seq)
            later = partial(self._host.call_soon, launched)
            self._life.channel.post_receive(view, done, later)
        else:
            self._life.channel.post_receive(view, done)
            self._posted(announce.link_seq)

    def _posted(self, seq: int) -> None:
        if self.state == "open":
            self._host.send(self.link_id, Posted(link_seq=seq))

    def _check_announce(self, announce: Announce) -> None:
        """Everything that could hurt after the post; a larger send would abort this process."""
        if announce.link_seq != self._next_seq:
            raise TransferError(
                f"Announce {announce.link_seq} came; {self._next_seq} is the next on this link"
            )
        expected = announce.count * self._block_bytes
        if announce.count < 1 or announce.nbytes != expected or expected > self._max_segment:
            raise TransferError(
                f"Announce {announce.link_seq} says {announce.nbytes} bytes for {announce.count} "
                f"blocks; a block has {self._block_bytes} and a segment at most {self._max_segment}"
            )

    def _landing(self, segment: IncomingSegment) -> torch.Tensor:
        ids = segment.block_ids
        if self._memory.in_place and is_run(ids):
            return self._cache.block_bytes_view(ids[0], len(ids))
        assert self._ring is not None
        nbytes = segment.announce.nbytes
        segment.staging = self._ring.take(nbytes) or Staging.fresh(nbytes, self._memory.channel)
        return segment.staging.view

    def _completed(  # on a completion thread
        self,
        seq: int,
        view: torch.Tensor,
        digest: Digest,
        wanted: int,
        error: TransferError | None,
    ) -> None:
        matches = error is None and digest(view) == wanted
        self._host.call_soon(partial(self._settle, seq, matches, error))

    def _settle(self, seq: int, matches: bool, error: TransferError | None) -> None:
        if self.state != "open":
            return  # the fence failed it; nothing of it counts
        if error is not None:
            self._fail("link_down", f"segment {seq} did not arrive: {error}")
        elif not matches:
            self._on_damage(seq)
        else:
            self._on_segment(self._segments.pop(seq))
        self._life.flush()

    def _on_damage(self, seq: int) -> None:
        segment = self._segments[seq]
        self._host.send(self.link_id, Received(link_seq=seq, ok=False))
        if segment.handoff is not None:
            self._life.add(DigestMismatch(segment.announce.handoff_id))
        self._fail("digest", f"segment {seq} arrived damaged: its digest does not match")

    def _on_segment(self, segment: IncomingSegment) -> None:
        announce, handoff = segment.announce, segment.handoff
        if segment.staging is not None:
            if handoff is not None:
                self._cache.write_blocks(segment.block_ids, segment.staging.view)
            segment.staging.release()
        self._host.send(self.link_id, Received(link_seq=announce.link_seq, ok=True))
        first, count = announce.first_block, announce.count
        if handoff is None:
            if segment.block_ids:  # abandoned after the post: its quarantine ends
                self.stale += 1
                self._life.add(BlocksReleased(frozenset(segment.block_ids)))
        elif handoff.receive(first, count, self._clock()):
            received = SegmentReceived(announce.handoff_id, first, count, announce.nbytes)
            self._life.add(received)
        else:
            self.stale += 1

    def _fail(self, reason: str, message: str, *, tell: bool = True) -> None:
        self._life.end(reason, message, self._release_all, tell=tell)

    def _release_all(self) -> frozenset[int]:
        """After the fence: what was quarantined for this link; nothing is in flight any more."""
        released: set[int] = set()
        for segment in self._segments.values():
            if segment.handoff is None:
                released.update(segment.block_ids)
            if segment.staging is not None:
                segment.staging.release()
        self._segments.clear()
        return frozenset(released)
