"""A link that does not open is tried again for ever, at a pause that grows and then stays."""

from __future__ import annotations

import pytest

from decode.links import FIRST_RETRY, LAST_RETRY, ReceivingLinks
from tasuki.clock import FakeClock
from tasuki.kv.cache import KVCache
from tasuki.messages import FromEngine, OpenLink, PrefillTarget
from tasuki.transfer.connectors.loopback import LoopbackConnector
from tests.transfer.rig import LAYOUT, RECEIVER_EPOCH, Loop, Side, settings

TARGET = PrefillTarget(worker_id="p", worker_epoch=1, address="h:1")


def test_a_peer_that_never_opens_is_asked_for_hours() -> None:
    clock, said = FakeClock(), list[FromEngine]()
    links = ReceivingLinks(
        KVCache(LAYOUT, 4),
        LoopbackConnector(),
        settings("d", RECEIVER_EPOCH),
        Side(Loop()),
        said.append,
        lambda link, event: None,
        clock,
    )
    links.know([TARGET])
    pauses = list[float]()
    for _ in range(1100):
        lost_at = clock()
        while not list(links):
            links.tick(0, 0.0)
            clock.advance(FIRST_RETRY / 2)
        pauses.append(clock() - lost_at)
        (link,) = links
        links.end(link.link_id)  # refused: another layout, say
    assert sum(isinstance(message, OpenLink) for message in said) == len(pauses)
    assert pauses[1] < pauses[5] < pauses[9]
    assert pauses[-1] == pytest.approx(LAST_RETRY, abs=FIRST_RETRY)
