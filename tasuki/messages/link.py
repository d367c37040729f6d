"""The control stream of a link between one decode and one prefill worker."""

from __future__ import annotations

from tasuki.messages.base import Message


class LayoutDescription(Message, frozen=True):
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


class LinkHello(Message, frozen=True):
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


class LinkAccept(Message, frozen=True):
    """The prefill worker's answer; a refusal is the end of the stream with an error instead."""

    token: bytes
    layout: LayoutDescription
    digest: str
    max_segment_bytes: int  # the smaller of both


class Rendezvous(Message, frozen=True):
    """One key of the process group's store, carried to the other side."""

    key: str
    value: bytes


class Announce(Message, frozen=True):
    """A debt: exactly one message of `nbytes` follows on the data channel, in `link_seq` order."""

    link_seq: int
    handoff_id: str
    first_block: int  # logical, within the prompt
    count: int
    nbytes: int
    digest: int  # 0 when digests are off


class Posted(Message, frozen=True):
    link_seq: int


class Received(Message, frozen=True):
    link_seq: int
    ok: bool  # False: the digest did not match


class Commit(Message, frozen=True):
    """Follows the last Announce of its handoff."""

    handoff_id: str
    tokens: int  # prompt positions handed over
    blocks: int  # blocks announced


class Abandoned(Message, frozen=True):
    handoff_id: str
    reason: str


class LinkClosed(Message, frozen=True):
    reason: str


class Heartbeat(Message, frozen=True):
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
