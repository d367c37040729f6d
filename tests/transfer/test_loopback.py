from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
import torch

from tasuki.clock import monotonic
from tasuki.errors import TransferError
from tasuki.transfer.connector import Channel, ChannelSpec
from tasuki.transfer.connectors.loopback import LoopbackConnector
from tasuki.transfer.connectors.loopback_fault import PlannedFault, Verdict
from tests.transfer.channels import Completions, open_pair, payload


def test_bytes_arrive_in_order_and_every_ticket_completes_once() -> None:
    sender, receiver = open_pair(LoopbackConnector())
    done = Completions()
    views = [torch.zeros(8, dtype=torch.uint8) for _ in range(5)]
    for index, view in enumerate(views):
        receiver.post_receive(view, done.named(f"r{index}"))
    for index in range(5):
        sender.send(payload(8, index), done.named(f"s{index}"))
    done.wait(10)
    assert [view[0].item() for view in views] == [0, 1, 2, 3, 4]
    assert [name for name in done.order if name[0] == "r"] == ["r0", "r1", "r2", "r3", "r4"]
    sender.close()
    receiver.close()
    assert len(done.order) == 10
    assert not any(done.errors.values())


def test_a_send_before_its_receive_is_refused() -> None:
    sender, receiver = open_pair(LoopbackConnector())
    done = Completions()
    sender.send(payload(8, 1), done.named("s"))
    done.wait(1)
    assert "before its receive was posted" in str(done.errors["s"])
    receiver.close()


def test_sizes_must_be_equal() -> None:
    sender, receiver = open_pair(LoopbackConnector())
    done = Completions()
    small = torch.zeros(4, dtype=torch.uint8)
    receiver.post_receive(small, done.named("r"))
    sender.send(payload(8, 1), done.named("s"))
    done.wait(2)
    assert "8 bytes met a receive of 4" in str(done.errors["r"])
    assert small.sum() == 0
    sender.close()


def test_close_fails_what_is_open_on_both_ends_and_writes_nothing_afterwards() -> None:
    fault = PlannedFault({0: Verdict.HOLD})
    sender, receiver = open_pair(LoopbackConnector(fault))
    done = Completions()
    view = torch.zeros(8, dtype=torch.uint8)
    receiver.post_receive(view, done.named("r0"))
    receiver.post_receive(view, done.named("r1"))
    sender.send(payload(8, 1), done.named("s0"))
    receiver.close()
    assert sorted(done.order) == ["r0", "r1", "s0"]
    assert all(done.errors.values())
    fault.release(0)
    assert view.sum() == 0
    receiver.post_receive(view, done.named("late"))
    sender.send(view, done.named("later"))
    assert all("closed" in str(done.errors[name]) for name in ("late", "later"))
    receiver.close()
    sender.close()


def test_faults_drop_flip_and_hold() -> None:
    fault = PlannedFault({0: Verdict.DROP, 1: Verdict.FLIP, 2: Verdict.HOLD})
    sender, receiver = open_pair(LoopbackConnector(fault))
    done = Completions()
    views = [torch.zeros(8, dtype=torch.uint8) for _ in range(3)]
    for index, view in enumerate(views):
        receiver.post_receive(view, done.named(f"r{index}"))
        sender.send(payload(8, 7), done.named(f"s{index}"))
    done.wait(3)
    assert done.order == ["s0", "s1", "r1"]
    assert views[0].sum() == 0
    assert int((views[1] != 7).sum()) == 1
    fault.release(2)
    done.wait(5)
    assert bool((views[2] == 7).all())
    receiver.close()
    assert "r0" in done.order
    sender.close()


@dataclass
class Dictionary:
    """A store both ends share."""

    values: dict[str, bytes] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def set(self, key: str, value: bytes) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key: str, deadline: float) -> bytes:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, deadline - monotonic()):
                raise TransferError(f"no {key}")
            return self.values[key]


def test_a_wrong_token_and_a_missing_peer_are_errors() -> None:
    connector = LoopbackConnector()
    store = Dictionary({"loopback/1": b"x" * 32})
    spec = ChannelSpec("l", 0, b"a" * 32, b"b" * 32, 64)
    with pytest.raises(TransferError, match="token"):
        connector.open(spec, store, monotonic() + 1)
    store.values["loopback/1"] = b"b" * 32
    with pytest.raises(TransferError, match="not in this process"):
        connector.open(spec, store, monotonic() + 0.01)


def test_many_links_share_one_connector() -> None:
    connector = LoopbackConnector()
    pairs: list[tuple[Channel, Channel]] = [open_pair(connector, f"l{n}") for n in range(3)]
    done = Completions()
    views = [torch.zeros(4, dtype=torch.uint8) for _ in pairs]
    for index, (sender, receiver) in enumerate(pairs):
        receiver.post_receive(views[index], done.named(f"r{index}"))
        sender.send(payload(4, index + 1), done.named(f"s{index}"))
    done.wait(6)
    assert [int(view[0]) for view in views] == [1, 2, 3]
    for sender, receiver in pairs:
        sender.close()
        receiver.close()
