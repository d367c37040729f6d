"""Whether a cluster is ready as its router sees it: workers ready and, when split, links open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tasuki.client import Client
from tasuki.errors import UnavailableError
from tasuki.messages import Role

PROBE_TIMEOUT = 5.0


class SeenWorker(msgspec.Struct, frozen=True):
    """The part of a worker's description in the router's facts that readiness asks for."""

    role: str
    worker_id: str
    state: str


async def missing_parts(router_address: str, prefill: int, decode: int) -> str:
    """What a cluster of that many workers still lacks, in words; empty when it is ready.

    Raises UnavailableError while the router does not answer.
    """
    async with Client(router_address) as client:
        server = await client.server_info(timeout=PROBE_TIMEOUT)
    return missing_from(server.facts, prefill, decode)


def missing_from(facts: Mapping[str, str], prefill: int, decode: int) -> str:
    """The same, from the facts of the router's GetServerInfo."""
    try:
        workers = msgspec.json.decode(facts["workers"], type=list[SeenWorker])
        links = msgspec.json.decode(facts["links"], type=list[str])
    except (KeyError, msgspec.DecodeError) as error:
        raise UnavailableError(f"the router's facts cannot be read: {error!r}") from error
    ready = {
        role: [
            worker.worker_id
            for worker in workers
            if worker.role == role and worker.state == "ready"
        ]
        for role in Role
    }
    missing = []
    for role, wanted in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        if len(ready[role]) < wanted:
            missing.append(f"{wanted - len(ready[role])} of {wanted} {role} workers")
    if not missing:
        closed = _closed_links(ready[Role.PREFILL], ready[Role.DECODE], links)
        missing += [f"link {link}" for link in closed]
    return ", ".join(missing)


def _closed_links(
    prefill: Sequence[str], decode: Sequence[str], open_links: list[str]
) -> list[str]:
    wanted = [f"{sender}->{receiver}" for sender in prefill for receiver in decode]
    return [link for link in wanted if link not in open_links]
