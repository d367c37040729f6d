"""Worker.Link on the wire: the frames of one link's control stream, both ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tasuki.errors import InvalidRequestError
from tasuki.messages import (
    Abandoned,
    Announce,
    Commit,
    Heartbeat,
    LayoutDescription,
    LinkAccept,
    LinkClosed,
    LinkHello,
    LinkMessage,
    Posted,
    Received,
    Rendezvous,
)
from tasuki.v1 import worker_pb2
from tasuki.wire import values

TOKEN_BYTES = 32
MAX_RENDEZVOUS_BYTES = 64 << 10
_LAYOUT_FIELDS = tuple(LayoutDescription.__struct_fields__)

# the field of a LinkFrame for each message; all but two have the same fields on both sides
_FRAME_FIELDS: dict[type[Any], tuple[str, type[Any]]] = {
    LinkHello: ("hello", worker_pb2.LinkHello),
    LinkAccept: ("accept", worker_pb2.LinkAccept),
    Rendezvous: ("rendezvous", worker_pb2.Rendezvous),
    Announce: ("announce", worker_pb2.Announce),
    Posted: ("posted", worker_pb2.Posted),
    Received: ("received", worker_pb2.Received),
    Commit: ("commit", worker_pb2.Commit),
    Abandoned: ("abandoned", worker_pb2.Abandoned),
    LinkClosed: ("closed", worker_pb2.LinkClosed),
    Heartbeat: ("heartbeat", worker_pb2.Heartbeat),
}


def link_frame_to_proto(link_id: str, message: LinkMessage) -> worker_pb2.LinkFrame:
    field, cls = _FRAME_FIELDS[type(message)]
    values = {key: getattr(message, key) for key in message.__struct_fields__}
    if isinstance(message, LinkHello | LinkAccept):
        values["layout"] = layout_to_proto(message.layout)
    return worker_pb2.LinkFrame(link_id=link_id, **{field: cls(**values)})


def link_frame_from_proto(frame: worker_pb2.LinkFrame) -> tuple[str, LinkMessage]:
    """The link's id and the message."""
    link_id = values.hex_id("link_id", frame.link_id)
    kind = frame.WhichOneof("message")
    if kind is None:
        raise InvalidRequestError("a LinkFrame holds no message; is the sender newer?")
    return link_id, _MESSAGES[kind](getattr(frame, kind))


def layout_to_proto(layout: LayoutDescription) -> worker_pb2.LayoutDescription:
    return worker_pb2.LayoutDescription(**{key: getattr(layout, key) for key in _LAYOUT_FIELDS})


def layout_from_proto(layout: worker_pb2.LayoutDescription) -> LayoutDescription:
    return LayoutDescription(**{key: getattr(layout, key) for key in _LAYOUT_FIELDS})


def _token(value: bytes) -> bytes:
    if len(value) != TOKEN_BYTES:
        raise InvalidRequestError(f"token has {len(value)} bytes; expected {TOKEN_BYTES}")
    return value


def _digest_name(value: str) -> str:
    if value not in ("xxh3", "none"):
        raise InvalidRequestError(f"digest is {value[:64]!r}; expected xxh3 or none")
    return value


def _hello(hello: worker_pb2.LinkHello) -> LinkHello:
    return LinkHello(
        token=_token(hello.token),
        decode_worker_id=values.name("decode_worker_id", hello.decode_worker_id),
        decode_epoch=hello.decode_epoch,
        prefill_worker_id=values.name("prefill_worker_id", hello.prefill_worker_id),
        prefill_epoch=hello.prefill_epoch,
        layout=layout_from_proto(hello.layout),
        connector=values.name("connector", hello.connector),
        digest=_digest_name(hello.digest),
        max_segment_bytes=hello.max_segment_bytes,
    )


def _accept(accept: worker_pb2.LinkAccept) -> LinkAccept:
    return LinkAccept(
        token=_token(accept.token),
        layout=layout_from_proto(accept.layout),
        digest=_digest_name(accept.digest),
        max_segment_bytes=accept.max_segment_bytes,
    )


def _rendezvous(rendezvous: worker_pb2.Rendezvous) -> Rendezvous:
    if len(rendezvous.value) > MAX_RENDEZVOUS_BYTES:
        raise InvalidRequestError(
            f"a rendezvous value has {len(rendezvous.value)} bytes; "
            f"expected at most {MAX_RENDEZVOUS_BYTES}"
        )
    return Rendezvous(key=values.name("key", rendezvous.key), value=rendezvous.value)


def _announce(announce: worker_pb2.Announce) -> Announce:
    if not announce.count or not announce.nbytes:
        raise InvalidRequestError(
            f"an Announce of {announce.count} blocks and {announce.nbytes} bytes; expected some"
        )
    return Announce(
        link_seq=announce.link_seq,
        handoff_id=values.hex_id("handoff_id", announce.handoff_id),
        first_block=announce.first_block,
        count=announce.count,
        nbytes=announce.nbytes,
        digest=announce.digest,
    )


def _commit(commit: worker_pb2.Commit) -> Commit:
    handoff_id = values.hex_id("handoff_id", commit.handoff_id)
    return Commit(handoff_id=handoff_id, tokens=commit.tokens, blocks=commit.blocks)


def _abandoned(abandoned: worker_pb2.Abandoned) -> Abandoned:
    handoff_id = values.hex_id("handoff_id", abandoned.handoff_id)
    return Abandoned(handoff_id=handoff_id, reason=abandoned.reason)


_MESSAGES: dict[str, Callable[[Any], LinkMessage]] = {
    "hello": _hello,
    "accept": _accept,
    "rendezvous": _rendezvous,
    "announce": _announce,
    "posted": lambda m: Posted(link_seq=m.link_seq),
    "received": lambda m: Received(link_seq=m.link_seq, ok=m.ok),
    "commit": _commit,
    "abandoned": _abandoned,
    "closed": lambda m: LinkClosed(reason=m.reason),
    "heartbeat": lambda m: Heartbeat(steps=m.steps, age=values.finite("age", m.age)),
}
