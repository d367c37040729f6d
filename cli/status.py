"""`tasuki status`: the workers of a running cluster, and what each of them computes with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from cli.command import Command
from cli.up_config import DEFAULT_PORT
from tasuki.client import Client, ServerDescription
from tasuki.config import setting
from tasuki.errors import TasukiError, UnavailableError
from tasuki.messages import Role

HELP = """\
Asks a router for its workers, and each worker what it computes with: whether results are exact to
the bit here, which kernels and dtype, how much memory, and which links are open.

  tasuki status                             the cluster that `tasuki up` started
  tasuki status --target 127.0.0.1:50051    another router
"""
SHOWN = (
    "exactness",
    "attention",
    "linears",
    "dtype",
    "threads",
    "max_num_batched_tokens",
    "memory",
)


@dataclass(frozen=True, kw_only=True)
class StatusConfig:
    """Every flag of `tasuki status`."""

    target: str = setting(f"127.0.0.1:{DEFAULT_PORT}", "The router, as host:port.")
    timeout: float = setting(10.0, "Seconds that each process gets to answer.")
    json: bool = setting(False, "One JSON object instead of text.")


class Worker(msgspec.Struct, frozen=True):
    """A worker as the router sees it."""

    role: str
    worker_id: str
    worker_epoch: str
    address: str
    state: str


@dataclass(frozen=True)
class Status:
    router: ServerDescription
    workers: list[Worker]
    links: list[str]
    facts: Mapping[str, Mapping[str, str]]  # of the workers that answered, by address


async def ask(config: StatusConfig) -> Status:
    """Raises UnavailableError when there is no router; a worker that is silent has no facts."""
    async with Client(config.target) as client:
        router = await client.server_info(timeout=config.timeout)
    try:
        workers = msgspec.json.decode(router.facts["workers"], type=list[Worker])
        links = msgspec.json.decode(router.facts["links"], type=list[str])
    except (KeyError, msgspec.DecodeError):
        raise UnavailableError(
            f"{config.target} is a {router.role or 'process'} that knows no workers; "
            "expected the address of a router"
        ) from None
    answers = await asyncio.gather(*(facts_of(w.address, config.timeout) for w in workers))
    known = {w.address: facts for w, facts in zip(workers, answers, strict=True) if facts}
    return Status(router, workers, links, known)


async def facts_of(address: str, seconds: float) -> Mapping[str, str] | None:
    try:
        async with Client(address) as client:
            return (await client.server_info(timeout=seconds)).facts
    except TasukiError:
        return None


def as_text(status: Status) -> str:
    facts = status.router.facts
    lines = [
        f"model {facts.get('model', '?')}, {facts.get('setup', '?')}, "
        f"at most {facts.get('capacity', '?')} tokens per request",
        f"results: {exactness(status)}",
    ]
    for worker in status.workers:
        lines.append(f"\n{worker.worker_id}  {worker.role}, {worker.state}, {worker.address}")
        known = status.facts.get(worker.address)
        if known is None:
            lines.append("  does not answer")
            continue
        lines += [f"  {name:<23} {known[name]}" for name in SHOWN if name in known]
    if status.links:
        lines.append("\nopen links: " + ", ".join(status.links))
    return "\n".join(lines)


def exactness(status: Status) -> str:
    """Split, colocated and fallback give the same bits where every worker computes alike and each
    one's own results depend on nothing beside them.
    """
    facts = [status.facts.get(worker.address, {}) for worker in status.workers]
    said = {known.get("exactness", "not known") for known in facts}
    if not facts or said != {"bit-exact"}:
        return f"{', '.join(sorted(said)) or 'no workers'}"
    if len({known.get("numerics") for known in facts}) > 1:
        return "tokens compared within tolerance: the workers compute in different ways"
    both = {worker.role for worker in status.workers} == set(Role)
    return "bit-exact, wherever a prompt is computed" if both else "bit-exact"


def as_json(status: Status) -> dict[str, Any]:
    workers: Sequence[dict[str, Any]] = [
        msgspec.to_builtins(worker) | {"facts": status.facts.get(worker.address)}
        for worker in status.workers
    ]
    return {"results": exactness(status), "workers": workers, "links": status.links}


def run_status(config: StatusConfig) -> int:
    """Run the command; returns the exit code. Raises TasukiError."""
    status = asyncio.run(ask(config))
    print(json.dumps(as_json(status)) if config.json else as_text(status))
    return 0


STATUS = Command(
    name="status",
    summary="the workers of a running cluster, and whether results are exact there",
    help=HELP,
    config=StatusConfig,
    run=run_status,
)
