"""One order per device: first come first served, one out in each direction, each completed once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from tasuki.clock import monotonic
from tasuki.transfer.connectors.launch_order import Direction, LaunchOrder, Operation
from tests.transfer.channels import Completions
from tests.transfer.fake_nccl import FakeFlight


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not true within {seconds} s"
        time.sleep(0.001)


class Desk:
    """An order and what it launched, by name."""

    def __init__(self) -> None:
        self.order = LaunchOrder("test-launch")
        self.done = Completions()
        self.launched: list[str] = []
        self.told: list[str] = []
        self.threads: set[int] = set()
        self.flights: dict[str, FakeFlight] = {}

    def submit(self, owner: object, direction: Direction, name: str) -> None:
        launch, told = partial(self._launch, name), partial(self.told.append, name)
        self.order.submit(direction, Operation(owner, launch, self.done.named(name), told))

    def _launch(self, name: str) -> FakeFlight:
        if name.startswith("bad"):
            raise RuntimeError("no")
        self.threads.add(threading.get_ident())
        flight = self.flights[name] = FakeFlight()
        self.launched.append(name)
        return flight

    def close(self, owner: object, seconds: float = 10.0) -> bool:
        self.order.retire(owner)
        return self.order.settle(owner, monotonic() + seconds)


def test_one_send_and_one_receive_are_out_and_the_rest_wait_their_turn() -> None:
    desk = Desk()
    for owner in "ab":
        desk.order.enter(owner)
    for number in range(3):
        desk.submit("a", "send", f"sa{number}")
        desk.submit("b", "send", f"sb{number}")
        desk.submit("b", "receive", f"r{number}")
    until(lambda: len(desk.launched) == 2)
    time.sleep(0.02)  # nothing more comes
    assert sorted(desk.launched) == ["r0", "sa0"]
    expected = ["sa0", "sb0", "sa1", "sb1", "sa2", "sb2"]
    for name in expected:
        until(lambda name=name: name in desk.launched)  # type: ignore[misc]
        desk.flights[name].ended = True
    desk.done.wait(6)
    assert [name for name in desk.launched if name[0] == "s"] == expected
    assert desk.done.order == expected
    assert not any(desk.done.errors.values())
    assert len(desk.threads) == 1
    desk.flights["r0"].ended = True
    desk.done.wait(7)
    until(lambda: "r1" in desk.told)
    assert desk.told == desk.launched
    assert desk.close("a")
    desk.flights["r1"].ended = True
    assert desk.close("b")


def test_closing_fails_everything_of_its_owner_once_and_nothing_of_others() -> None:
    desk = Desk()
    for owner in "ab":
        desk.order.enter(owner)
    desk.submit("a", "receive", "a0")
    desk.submit("b", "receive", "b0")
    desk.submit("a", "receive", "a1")
    desk.submit("a", "send", "a2")
    until(lambda: len(desk.launched) == 2)
    desk.order.retire("a")
    desk.submit("a", "send", "late")
    assert str(desk.done.errors["late"]) == "the channel is closed"
    for flight in desk.flights.values():
        flight.ended = True  # what an abort does
    assert desk.order.settle("a", monotonic() + 10)
    assert {name for name, error in desk.done.errors.items() if error} == {"late", "a0", "a1", "a2"}
    until(lambda: "b0" in desk.launched)
    desk.flights["b0"].ended = True
    desk.done.wait(5)
    assert desk.done.errors["b0"] is None
    assert "a1" not in desk.launched
    assert desk.close("b")


def test_what_the_device_does_not_end_is_not_called_settled() -> None:
    desk = Desk()
    desk.order.enter("a")
    desk.submit("a", "receive", "r0")
    desk.submit("a", "receive", "r1")
    until(lambda: "r0" in desk.launched)
    assert not desk.close("a", 0.05)
    assert list(desk.done.errors) == ["r1"]
    desk.flights["r0"].ended = True
    desk.done.wait(2)
    assert desk.done.errors["r0"] is not None


def test_a_launch_that_fails_makes_room_and_a_lost_device_does_not() -> None:
    desk = Desk()
    desk.order.enter("a")
    desk.submit("a", "send", "bad")
    desk.submit("a", "send", "s0")
    desk.done.wait(1)
    assert str(desk.done.errors["bad"]) == "it was not launched: no"
    until(lambda: "s0" in desk.launched)
    desk.flights["s0"].lost = True
    desk.done.wait(2)
    assert "illegal memory access" in str(desk.done.errors["s0"])
    assert not desk.close("a", 0.05)
    assert desk.told == ["s0"]
    desk.order._free("send")  # or its thread would look for ever


def test_the_thread_comes_and_goes_with_the_channels() -> None:
    desk = Desk()
    for name in ("s0", "s1", "s2"):
        desk.order.enter("a")
        desk.submit("a", "send", name)
        until(lambda name=name: name in desk.flights)  # type: ignore[misc]
        desk.flights[name].ended = True
        assert desk.close("a")
        until(lambda: "test-launch" not in {thread.name for thread in threading.enumerate()})
    assert desk.done.order == ["s0", "s1", "s2"]
