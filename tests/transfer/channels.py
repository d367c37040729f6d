"""Two ends of one channel, opened by two threads, and a place where completions gather."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from tasuki.clock import monotonic
from tasuki.errors import TransferError
from tasuki.transfer.connector import Channel, ChannelSpec, Completion, Connector
from tasuki.transfer.rendezvous import ControlStreamStore

TOKENS = (b"p" * 32, b"d" * 32)


def payload(nbytes: int, value: int) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def make_stores() -> tuple[ControlStreamStore, ControlStreamStore]:
    """Two stores wired to each other, as the control stream wires them."""
    stores: list[ControlStreamStore] = []
    first = ControlStreamStore(lambda key, value: stores[1].deliver(key, value))
    second = ControlStreamStore(lambda key, value: stores[0].deliver(key, value))
    stores += [first, second]
    return first, second


def open_pair(
    connector: Connector,
    link_id: str = "l",
    *,
    expect: tuple[bytes, bytes] = TOKENS,
    peer: Connector | None = None,
    seconds: float = 20.0,
) -> tuple[Channel, Channel]:
    """Both ends; `expect[rank]` is the token that the other rank waits for."""
    deadline = monotonic() + seconds
    stores = make_stores()
    specs = [
        ChannelSpec(link_id, 0, TOKENS[0], expect[1], 1 << 30),
        ChannelSpec(link_id, 1, TOKENS[1], expect[0], 1 << 30),
    ]
    with ThreadPoolExecutor(2) as pool:
        opening = [
            pool.submit(connector.open, specs[0], stores[0], deadline),
            pool.submit((peer or connector).open, specs[1], stores[1], deadline),
        ]
    for one, other in (opening, opening[::-1]):
        if one.exception() is not None and other.exception() is None:
            other.result().close()
    return opening[0].result(), opening[1].result()


class Completions:
    """Collects completions; a second one of the same ticket is an error."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.errors: dict[str, TransferError | None] = {}
        self._changed = threading.Condition()

    def named(self, name: str) -> Completion:
        def done(error: TransferError | None) -> None:
            with self._changed:
                assert name not in self.errors, f"{name} completed twice"
                self.order.append(name)
                self.errors[name] = error
                self._changed.notify_all()

        return done

    def wait(self, count: int, seconds: float = 20.0) -> None:
        with self._changed:
            ready = self._changed.wait_for(lambda: len(self.order) >= count, seconds)
            assert ready, f"{self.order} after {seconds} s; expected {count}"
