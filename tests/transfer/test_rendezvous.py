from __future__ import annotations

import threading

import pytest

from tasuki.clock import monotonic
from tasuki.errors import TransferError
from tasuki.transfer.rendezvous import MAX_KEYS, MAX_VALUE_BYTES, ControlStreamStore


def test_own_keys_are_published_and_seen() -> None:
    published: list[tuple[str, bytes]] = []
    store = ControlStreamStore(lambda key, value: published.append((key, value)))
    store.set("a", b"1")
    assert published == [("a", b"1")]
    assert store.get("a", monotonic()) == b"1"


def test_a_get_waits_for_the_peer_until_its_deadline() -> None:
    store = ControlStreamStore(lambda key, value: None)
    with pytest.raises(TransferError, match="'b' in time"):
        store.get("b", monotonic() + 0.01)
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(store.get("b", monotonic() + 20)))
    thread.start()
    store.deliver("b", b"2")
    thread.join(20)
    assert got == [b"2"]


def test_cancel_wakes_who_waits_and_who_comes_later() -> None:
    store = ControlStreamStore(lambda key, value: None)
    errors: list[str] = []

    def wait() -> None:
        try:
            store.get("never", monotonic() + 20)
        except TransferError as error:
            errors.append(error.message)

    thread = threading.Thread(target=wait)
    thread.start()
    store.cancel("the worker left")
    thread.join(20)
    wait()
    assert len(errors) == 2
    assert all("the worker left" in error for error in errors)


def test_absurd_keys_are_violations() -> None:
    store = ControlStreamStore(lambda key, value: None)
    with pytest.raises(TransferError, match="limits"):
        store.deliver("a", bytes(MAX_VALUE_BYTES + 1))
    for index in range(MAX_KEYS):
        store.deliver(str(index), b"")
    with pytest.raises(TransferError, match="limits"):
        store.deliver("one more", b"")
