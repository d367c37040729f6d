"""A connector whose links can be slowed, damaged and cut."""

from __future__ import annotations

import pytest

from tasuki.clock import monotonic
from tasuki.transfer.connector import Connector
from tasuki.transfer.connectors.faulty import Faults, FaultyConnector
from tasuki.transfer.connectors.gloo import GlooConnector
from tasuki.transfer.connectors.loopback import LoopbackConnector
from tasuki.transfer.link_events import LinkFailed
from tests.transfer.channels import Completions, open_pair, payload
from tests.transfer.rig import make_rig, settings

BYTES = 1000


@pytest.fixture(params=["loopback", "gloo"])
def connector(request: pytest.FixtureRequest) -> FaultyConnector:
    inner: Connector = LoopbackConnector() if request.param == "loopback" else GlooConnector()
    return FaultyConnector(inner, Faults())


def test_without_a_fault_bytes_pass_in_order(connector: FaultyConnector) -> None:
    sender, receiver = open_pair(connector)
    done = Completions()
    views = [payload(BYTES, 0) for _ in range(5)]
    for number, view in enumerate(views):
        receiver.post_receive(view, done.named(f"r{number}"))
    for number in range(5):
        sender.send(payload(BYTES, number + 1), done.named(f"s{number}"))
    done.wait(10)
    assert [int(view[0]) for view in views] == [1, 2, 3, 4, 5]
    assert [name for name in done.order if name[0] == "r"] == ["r0", "r1", "r2", "r3", "r4"]
    sender.close()
    receiver.close()


def test_slow_links_take_their_time_and_keep_their_order(connector: FaultyConnector) -> None:
    sender, receiver = open_pair(connector)
    done = Completions()
    connector.faults.slow(20 * BYTES)
    began = monotonic()
    for number in range(4):
        receiver.post_receive(payload(BYTES, 0), done.named(f"r{number}"))
        sender.send(payload(BYTES, number), done.named(f"s{number}"))
    done.wait(8)
    assert monotonic() - began >= 4 / 20  # never faster than its bandwidth
    assert [name for name in done.order if name[0] == "r"] == ["r0", "r1", "r2", "r3"]
    sender.close()
    receiver.close()


def test_closing_does_not_wait_for_what_is_slow(connector: FaultyConnector) -> None:
    sender, receiver = open_pair(connector)
    done = Completions()
    connector.faults.slow(1.0)
    receiver.post_receive(payload(BYTES, 0), done.named("r"))
    sender.send(payload(BYTES, 1), done.named("s"))
    sender.close()
    receiver.close()
    done.wait(2, seconds=10.0)
    assert all(error is not None for error in done.errors.values())
    sender.send(payload(BYTES, 1), done.named("late"))
    assert done.errors["late"] is not None


@pytest.mark.parametrize("speed", [0.0, 1e9])
def test_what_waits_feels_a_change_of_speed_at_once(
    connector: FaultyConnector, speed: float
) -> None:
    sender, receiver = open_pair(connector)
    done = Completions()
    connector.faults.slow(1.0)
    for number in range(3):
        receiver.post_receive(payload(BYTES, 0), done.named(f"r{number}"))
        sender.send(payload(BYTES, number), done.named(f"s{number}"))
    assert not done.order  # a thousand seconds each
    connector.faults.slow(speed)
    done.wait(6)
    assert [name for name in done.order if name[0] == "r"] == ["r0", "r1", "r2"]
    sender.close()
    receiver.close()


def test_a_link_that_is_slowed_down_in_the_middle_keeps_what_has_gone(
    connector: FaultyConnector,
) -> None:
    sender, receiver = open_pair(connector)
    done = Completions()
    connector.faults.slow(20 * BYTES)
    began = monotonic()
    for number in range(3):
        receiver.post_receive(payload(BYTES, 0), done.named(f"r{number}"))
        sender.send(payload(BYTES, number), done.named(f"s{number}"))
    done.wait(2)
    connector.faults.slow(5 * BYTES)  # at most two segments were to come, at a fifth of a second
    done.wait(6)
    assert monotonic() - began >= 1 / 20 + 1 / 5
    sender.close()
    receiver.close()


def test_what_a_closed_link_did_not_send_holds_up_no_other(connector: FaultyConnector) -> None:
    pairs = [open_pair(connector, link_id) for link_id in ("l", "m")]
    done = Completions()
    connector.faults.slow(BYTES)
    pairs[0][0].send(payload(100 * BYTES, 1), done.named("s0"))
    for end in pairs[0]:
        end.close()
    done.wait(1)
    sender, receiver = pairs[1]
    receiver.post_receive(payload(BYTES // 10, 0), done.named("r"))
    sender.send(payload(BYTES // 10, 1), done.named("s"))
    done.wait(3)  # not after a hundred seconds
    assert done.errors["r"] is None
    sender.close()
    receiver.close()


def test_damage_is_one_byte_of_so_many_segments(connector: FaultyConnector) -> None:
    sender, receiver = open_pair(connector)
    done = Completions()
    connector.faults.corrupt(2)
    views = [payload(BYTES, 0) for _ in range(3)]
    for number, view in enumerate(views):
        receiver.post_receive(view, done.named(f"r{number}"))
        sender.send(payload(BYTES, 7), done.named(f"s{number}"))
    done.wait(6)
    assert [int((view != 7).sum()) for view in views] == [1, 1, 0]
    sender.close()
    receiver.close()


def test_a_cut_ends_every_live_channel(connector: FaultyConnector) -> None:
    pairs = [open_pair(connector, link_id) for link_id in ("l", "m")]
    done = Completions()
    pairs[0][1].post_receive(payload(BYTES, 0), done.named("r"))
    assert connector.faults.cut() == 4
    done.wait(1)
    assert done.errors["r"] is not None
    for pair in pairs:
        for end in pair:
            end.close()  # again: it is over already


def test_a_link_over_it_notices_damage_and_cuts() -> None:
    for fault, reason in (("corrupt", "digest"), ("cut", "link_down")):
        connector = FaultyConnector(LoopbackConnector(), Faults())
        rig = make_rig(
            connector,
            sending=settings("p", 0xAAAA),
            receiving=settings("d", 0xBBBB),
        )
        rig.open()
        handoff = rig.handoff(0, [3, 4])
        if fault == "corrupt":
            connector.faults.corrupt(1)
        else:
            connector.faults.cut()
        rig.sender.offer(handoff.handoff_id, 0, [8, 9])
        rig.run_until(rig.both_failed)
        (failed,) = rig.decode.of(LinkFailed)
        assert failed.reason == reason
        assert handoff.received_run < 2
