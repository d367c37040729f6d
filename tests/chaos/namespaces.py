"""Hosts made of network namespaces on one bridge, with wires that can be slowed and cut.

Needs root, `ip` and `tc`. The addresses are of the range that is set aside for benchmarks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

NETWORK, LINK_NETWORK = "198.18.77", "198.18.78"  # both on the same wires
BURST_BYTES = 16_000  # that pass at once, however slow the wire


class NamespaceError(Exception):
    """A command of the network's failed; with what it said."""


@dataclass(frozen=True)
class Host:
    """A namespace with one wire to the bridge: `wire` is its end there, `eth0` its own."""

    namespace: str
    wire: str
    address: str
    link_address: str

    def program(self, argv: Sequence[str]) -> list[str]:
        """The same command, on this host; its process id stays that of the caller's child."""
        return ["ip", "netns", "exec", self.namespace, *argv]

    def limit(self, bits_per_second: int) -> None:
        """Let no more than that leave this host."""
        rate, burst = f"{bits_per_second}bit", f"{BURST_BYTES}b"
        shaped = ("root", "tbf", "rate", rate, "burst", burst, "latency", "200ms")
        run(*self.program(("tc", "qdisc", "replace", "dev", "eth0", *shaped)))

    def cut(self) -> None:
        run("ip", "link", "set", self.wire, "down")

    def mend(self) -> None:
        run("ip", "link", "set", self.wire, "up")


def run(*argv: str) -> None:
    """Raises NamespaceError."""
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise NamespaceError(f"{' '.join(argv)}: {ended.stderr.strip()}")


def why_impossible() -> str:
    """Why no such network can be made here; empty: it can."""
    lacking = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if lacking:
        return f"{' and '.join(lacking)} missing: install iproute2"
    if os.geteuid():
        return "network namespaces need root"
    try:
        with network(1) as (host,):
            host.limit(1_000_000)
    except NamespaceError as error:
        return str(error)
    return ""


@contextmanager
def network(count: int) -> Iterator[list[Host]]:
    """`count` hosts that see each other and this process. Raises NamespaceError; leaves nothing."""
    bridge = f"tsk{os.getpid()}"
    with ExitStack() as undo:
        run("ip", "link", "add", bridge, "type", "bridge")
        undo.callback(run, "ip", "link", "del", bridge)
        run("ip", "address", "add", f"{NETWORK}.1/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")
        hosts = [
            Host(
                f"{bridge}-{number}",
                f"{bridge}.{number}",
                f"{NETWORK}.{last}",
                f"{LINK_NETWORK}.{last}",
            )
            for number, last in enumerate(range(2, 2 + count))
        ]
        for host in hosts:
            _plug_in(host, bridge, undo)
        yield hosts


def _plug_in(host: Host, bridge: str, undo: ExitStack) -> None:
    run("ip", "netns", "add", host.namespace)
    undo.callback(run, "ip", "netns", "del", host.namespace)  # the wire goes with it
    peer = ("peer", "name", "eth0", "netns", host.namespace)
    run("ip", "link", "add", host.wire, "type", "veth", *peer)
    run("ip", "link", "set", host.wire, "master", bridge)
    run("ip", "link", "set", host.wire, "up")
    for words in (
        f"address add {host.address}/24 dev eth0",
        f"address add {host.link_address}/24 dev eth0",
        "link set eth0 up",
        "link set lo up",
    ):
        run("ip", "-n", host.namespace, *words.split())
