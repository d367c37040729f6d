"""Channels to other workers, shared by those who use them at the same time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from tasuki.server.grpc_server import internal_channel


@dataclass
class _Leased:
    channel: grpc.aio.Channel
    leases: int = 0


class PeerChannels:
    """One channel per address; closed when nobody leases it any more."""

    def __init__(self, connect: Callable[[str], grpc.aio.Channel] = internal_channel) -> None:
        self._connect = connect
        self._leased: dict[str, _Leased] = {}

    def __len__(self) -> int:
        return len(self._leased)

    @asynccontextmanager
    async def lease(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """A channel for as long as the block runs."""
        entry = self._leased.get(address)
        if entry is None:
            entry = self._leased[address] = _Leased(self._connect(address))
        entry.leases += 1
        try:
            yield entry.channel
        finally:
            entry.leases -= 1
            if not entry.leases:
                del self._leased[address]
                await entry.channel.close()
