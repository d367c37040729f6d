"""What a link tells the role that owns it: plain data, no behaviour.

Blocks are logical (counted within one prompt) unless they are called block ids.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkOpened:
    """Both the handshake and the channel are done; handoffs may use the link."""

    bit_exact: bool  # both workers compute with the same numerics


@dataclass(frozen=True)
class SegmentAnnounced:
    """Decode side: a receive is posted for these blocks."""

    handoff_id: str
    first_block: int
    count: int


@dataclass(frozen=True)
class SegmentReceived:
    """Decode side: these blocks are in place, and match their digest where digests are on."""

    handoff_id: str
    first_block: int
    count: int
    nbytes: int


@dataclass(frozen=True)
class SegmentSent:
    """Prefill side: the peer has these blocks."""

    handoff_id: str
    first_block: int
    count: int
    nbytes: int


@dataclass(frozen=True)
class DigestMismatch:
    """Decode side: a segment arrived damaged. LinkFailed("digest") follows."""

    handoff_id: str


@dataclass(frozen=True)
class CommitSeen:
    """Decode side: nothing more will be announced; ask the handoff whether it is committed."""

    handoff_id: str


@dataclass(frozen=True)
class PeerAbandoned:
    """Decode side: the prefill worker gave the handoff up. The role abandons it in turn."""

    handoff_id: str
    reason: str


@dataclass(frozen=True)
class BlocksReleased:
    """Decode side: nothing writes to these physical blocks any more: end their quarantine."""

    block_ids: frozenset[int]


@dataclass(frozen=True)
class HandoffDrained:
    """Prefill side: committed or abandoned, and nothing announced remains: free its blocks."""

    handoff_id: str


@dataclass(frozen=True)
class LinkFailed:
    """The last event of a link, exactly once, after the fence: no block is touched any more.

    `reason` is a fallback reason, `released_block_ids` the physical blocks in quarantine. Blocks
    of handoffs that were still live belong to the role as before. No HandoffDrained follows.
    """

    reason: str
    message: str
    released_block_ids: frozenset[int]


LinkEvent = (
    LinkOpened
    | SegmentAnnounced
    | SegmentReceived
    | SegmentSent
    | DigestMismatch
    | CommitSeen
    | PeerAbandoned
    | BlocksReleased
    | HandoffDrained
    | LinkFailed
)
