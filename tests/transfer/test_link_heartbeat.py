"""How an open link notices a peer that is stopped, cut off or stuck, and that nothing else is."""

from __future__ import annotations

import pytest

from tasuki.messages import Heartbeat, LinkClosed
from tasuki.transfer.link_events import LinkFailed
from tests.transfer.rig import Rig, make_rig

TIMEOUT = 3.0


@pytest.fixture
def rig() -> Rig:
    rig = make_rig()
    rig.open()
    return rig


def pass_time(rig: Rig, seconds: float, *, alive: tuple[str, ...] = ("prefill", "decode")) -> None:
    """In looks of 100 ms, as the engines' control threads take them."""
    for _ in range(round(seconds * 10)):
        rig.clock.advance(0.1)
        for name, link in (("prefill", rig.sender), ("decode", rig.receiver)):
            if name in alive:
                link.expire()
                link.beat(7, 0.25)
        rig.loop.drain()


def test_heartbeats_keep_an_idle_link_open(rig: Rig) -> None:
    pass_time(rig, 20 * TIMEOUT)
    assert (rig.sender.state, rig.receiver.state) == ("open", "open")
    for side in (rig.prefill, rig.decode):
        beats = side.of(Heartbeat)
        assert set(beats) == {Heartbeat(steps=7, age=0.25)}
        assert 60 <= len(beats) <= 130  # about two a second
    rig.close()


@pytest.mark.parametrize("stopped", ["prefill", "decode"])
def test_a_stopped_peer_is_found_within_the_timeout(rig: Rig, stopped: str) -> None:
    alive = "decode" if stopped == "prefill" else "prefill"
    link = rig.receiver if stopped == "prefill" else rig.sender
    side = rig.decode if stopped == "prefill" else rig.prefill
    pass_time(rig, TIMEOUT - 0.7, alive=(alive,))  # its last words may be half a second old
    assert link.state == "open"
    pass_time(rig, 0.8, alive=(alive,))
    (failed,) = side.of(LinkFailed)
    assert failed.reason == "stalled"
    assert "said nothing for 3.0 s" in failed.message
    assert side.of(LinkClosed)
    rig.close()


def test_our_own_sleep_is_no_silence_of_the_peer(rig: Rig) -> None:
    rig.clock.advance(3600.0)  # this process was stopped; the peer's heartbeats wait to be read
    rig.receiver.expire()
    rig.sender.expire()
    pass_time(rig, 1.0)
    assert (rig.sender.state, rig.receiver.state) == ("open", "open")
    rig.close()


def test_a_stuck_engine_is_found_by_the_age_of_its_step(rig: Rig) -> None:
    rig.receiver.on_message(Heartbeat(steps=9, age=59.0))
    assert rig.receiver.state == "open"
    rig.receiver.on_message(Heartbeat(steps=9, age=60.5))
    (failed,) = rig.decode.of(LinkFailed)
    assert failed.reason == "stalled"
    assert "step 9 for 60.5 s" in failed.message
    rig.close()
