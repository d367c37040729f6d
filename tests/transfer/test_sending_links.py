"""The links of a prefill worker: a newer one of the same decode worker replaces the older."""

from __future__ import annotations

import msgspec
import pytest

from prefill.links import SendingLinks
from tasuki.clock import FakeClock
from tasuki.kv.cache import KVCache
from tasuki.messages import FromEngine, LinkHello
from tasuki.transfer.connectors.loopback import LoopbackConnector
from tasuki.transfer.link_events import LinkEvent, LinkFailed
from tests.transfer.rig import DESCRIPTION, LAYOUT, SENDER_EPOCH, Loop, Side, settings

HELLO = LinkHello(
    token=bytes(32),
    decode_worker_id="d",
    decode_epoch=7,
    prefill_worker_id="p",
    prefill_epoch=SENDER_EPOCH,
    layout=DESCRIPTION,
    connector="loopback",
    digest="xxh3",
    max_segment_bytes=4 * LAYOUT.block_bytes,
)


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({}, "old"),
        ({"decode_worker_id": "other"}, ""),
        ({"prefill_epoch": 1}, "new"),  # meant for an engine that is gone
        ({"connector": "gloo"}, "new"),
        ({"max_segment_bytes": 1}, "new"),
        ({"layout": msgspec.structs.replace(DESCRIPTION, block_size=32)}, "new"),
    ],
)
def test_only_a_hello_that_is_taken_replaces_a_link(changes: dict[str, object], lost: str) -> None:
    failed, said = list[str](), list[FromEngine]()
    links = SendingLinks(
        KVCache(LAYOUT, 4),
        LoopbackConnector(),
        settings("p", SENDER_EPOCH),
        Side(Loop()),
        said.append,
        lambda link, event: note(failed, link.link_id, event),
        FakeClock(),
    )
    for link_id, hello in (("old", HELLO), ("new", msgspec.structs.replace(HELLO, **changes))):
        links.start(link_id)
        links.receive(link_id, hello)
    assert failed == ([lost] if lost else [])
    links.close()
    assert sorted(failed) == ["new", "old"]


def note(failed: list[str], link_id: str, event: LinkEvent) -> None:
    if isinstance(event, LinkFailed):
        failed.append(link_id)
