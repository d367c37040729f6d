"""KV between CPUs over torch.distributed's gloo: one two-rank process group per link.

Built directly, without `init_process_group`; its store rides the link's control stream. Every odd
thing below is a measured behaviour of gloo (design/HANDOFF.md): it trusts whoever connects first,
it cannot cancel, an expired wait closes the whole pair, and a transfer that stands in the middle
when the pair closes keeps its waiter until that wait's own timeout.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed import (  # type: ignore[attr-defined] # torch exports Store, unlisted
    ProcessGroupGloo,
    Store,
    Work,
)

from tasuki.clock import monotonic
from tasuki.errors import FenceLostError, TransferError
from tasuki.transfer.connector import Channel, ChannelSpec, RendezvousStore
from tasuki.transfer.connectors.gloo_channel import GlooChannel, GlooGroup, fence

TOKEN_TAG = 1
TOKEN_BYTES = 32
NICE = 10  # of gloo's own threads: they must not take the step's core
TASKS = Path("/proc/self/task")
EVERY_ADDRESS = ("0.0.0.0", "::")


class SilenceError(TransferError):
    """The data connection leads to somebody else; another attempt may find the peer."""


class ControlStore(Store):
    """The few calls that gloo makes while it pairs up: one set, and a wait and a get per rank."""

    def __init__(self, store: RendezvousStore, prefix: str, deadline: float) -> None:
        super().__init__()
        self._store = store
        self._prefix = prefix
        self._deadline = deadline

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override] # the stub says str; C++ passes bytes
        self._store.set(self._prefix + key, bytes(value))

    def get(self, key: str) -> bytes:
        return self._store.get(self._prefix + key, self._deadline)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


class GlooConnector:
    """Opens gloo pairs bound to one host's address; ports are free ones and travel as keys.

    `silence` bounds the wait for the one-time token, `stall` that for one segment, in seconds.
    """

    name = "gloo"

    def __init__(
        self, host: str = "127.0.0.1", *, silence: float = 1.0, stall: float = 30.0
    ) -> None:
        self.host = host
        self._silence = silence
        self._stall = stall

    def open(self, spec: ChannelSpec, store: RendezvousStore, deadline: float) -> Channel:
        """Pair up, and again on new ports while a stranger is in the way, until `deadline`.

        Raises TransferError: no peer in time, or the last attempt's reason.
        """
        if self.host in EVERY_ADDRESS:  # gloo would tell the peer to connect there
            raise TransferError(
                f"link {spec.link_id}: {self.host} is no address that a peer can connect to; "
                "name one of this host's with --link-host"
            )
        failure: TransferError | None = None
        attempt = 0
        while monotonic() < deadline:
            try:
                group = self._build(spec, ControlStore(store, f"{attempt}:", deadline), deadline)
                self._exchange_tokens(group, spec)
                return GlooChannel(group, spec, self._stall)
            except SilenceError as error:
                failure = TransferError(error.message)  # without the traceback that holds the group
            except FenceLostError:
                raise
            except TransferError as error:
                raise failure or error from None
            attempt += 1
        raise failure or TransferError(f"link {spec.link_id}: its deadline passed before it opened")

    def _build(self, spec: ChannelSpec, store: Store, deadline: float) -> GlooGroup:
        gloo: Any = ProcessGroupGloo  # the stubs lack its options
        options = gloo._Options()
        options._timeout = timedelta(seconds=max(0.001, deadline - monotonic()))
        options._threads = 1
        try:
            with low_priority_for_gloo_threads():
                options._devices = [gloo.create_device(hostname=self.host)]
                return cast(GlooGroup, gloo(store, spec.rank, 2, options))
        except RuntimeError as error:
            raise TransferError(
                f"link {spec.link_id}: no gloo pair on {self.host}: {error}; check that both "
                "hosts can reach each other"
            ) from error

    def _exchange_tokens(self, group: GlooGroup, spec: ChannelSpec) -> None:
        """Prove that whoever holds the data connection also holds the control stream."""
        arrived = torch.zeros(TOKEN_BYTES, dtype=torch.uint8)
        token = torch.frombuffer(bytearray(spec.token_out), dtype=torch.uint8)
        peer = 1 - spec.rank
        works: list[Work] = []
        problem: str | None = None
        try:
            works.append(group.recv([arrived], peer, TOKEN_TAG))
            works.append(group.send([token], peer, TOKEN_TAG))
            for work in works:
                work.wait(timedelta(seconds=self._silence))
        except RuntimeError as error:
            problem = f"no one-time token came over the data connection: {error}"
        if problem is None and bytes(arrived.numpy()) != spec.token_in:
            problem = "a wrong one-time token came over the data connection"
        if problem is not None:
            fence(group, peer)  # before the works are dropped
            raise SilenceError(f"link {spec.link_id}: {problem}; did a stranger connect to it?")


@contextmanager
def low_priority_for_gloo_threads() -> Iterator[None]:
    """Best effort: threads named after gloo that appear meanwhile get nice +10."""
    before = set(os.listdir(TASKS)) if TASKS.exists() else set()
    yield
    with suppress(OSError):
        for task in set(os.listdir(TASKS)) - before:
            with suppress(OSError):  # it may have ended
                if "gloo" in (TASKS / task / "comm").read_text():
                    os.setpriority(os.PRIO_PROCESS, int(task), NICE)
