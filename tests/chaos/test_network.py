"""Two workers on hosts of their own: over a narrow wire the tokens stay the same and the transfer
takes its time; a wire that is cut is noticed in time, and used again once it is whole.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from cli.cluster.cluster_spec import ClusterSpec, module_program
from cli.cluster.local_cluster import LocalCluster
from tasuki.client import Client
from tasuki.config import WorkerConfig
from tasuki.convert.tiny import make_tiny
from tasuki.messages import Role
from tests.chaos.namespaces import BURST_BYTES, Host, network, why_impossible
from tests.integration.scrape import Metrics, assert_no_leaks, scrape, scrape_until
from tests.integration.streams import ask, prompt
from tests.require import require

pytestmark = [pytest.mark.chaos, pytest.mark.dist, pytest.mark.timeout(300)]

PROMPT = prompt(1500, seed=9)
RATES = (100_000_000, 10_000_000)  # bits per second
PEER_TIMEOUT = 2.0
TRANSFER_SECONDS = 5.0  # of the transfer that is cut: long enough to be in its middle
MENDED_SECONDS = 30.0  # TCP tries again ever more seldom: after so short a cut, within ten seconds


@pytest.fixture
def hosts() -> Iterator[dict[str, Host]]:
    """One for each worker; the router, and these tests, are on a third."""
    reason = why_impossible()
    require("netns", not reason, f"network namespaces cannot be made: {reason}")
    with network(2) as (prefill, decode):
        yield {Role.PREFILL: prefill, Role.DECODE: decode}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest_asyncio.fixture(autouse=True)
async def grpc_poller() -> AsyncIterator[None]:
    """gRPC's own poller stays for the whole test, as it would in a program."""
    async with grpc.aio.insecure_channel("127.0.0.1:1"):
        yield


async def undisturbed(model: Path) -> list[int]:
    """What one worker alone says."""
    async with LocalCluster(ClusterSpec(model=model, prefill=0)) as cluster:
        await cluster.wait_ready()
        async with Client(cluster.router_address) as client:
            return (await ask(client, PROMPT)).token_ids


def far_apart(model: Path, hosts: dict[str, Host]) -> ClusterSpec:
    def program(role: str) -> list[str]:
        return hosts[role].program(module_program(role)) if role in hosts else module_program(role)

    return ClusterSpec(
        model=model,
        worker=WorkerConfig(
            prefix_caching=False, peer_timeout=PEER_TIMEOUT, handoff_timeout=60.0,
            segment_bytes=1 << 16,
        ),
        overrides={
            f"{role}-0": {"host": host.address, "link_host": host.link_address}
            for role, host in hosts.items()
        },
        program=program,
    )  # fmt: skip


async def test_a_narrow_wire_costs_time_and_nothing_else(
    tiny_model: Path, hosts: dict[str, Host]
) -> None:
    expected = await undisturbed(tiny_model)
    async with LocalCluster(far_apart(tiny_model, hosts)) as cluster:
        await cluster.wait_ready()
        (decode,) = cluster.workers_of(Role.DECODE)
        assert kv_connections(decode.engine_pid, hosts) > 0
        async with Client(cluster.router_address) as client:
            fast = await ask(client, PROMPT)
            moved = kv_bytes(await scrape(decode.metrics))
            answers = [fast]
            for times, rate in enumerate(RATES, 2):
                hosts[Role.PREFILL].limit(rate)
                slow = await ask(client, PROMPT)
                assert kv_bytes(await scrape(decode.metrics)) == times * moved > 0
                least = (moved - BURST_BYTES) * 8 / rate
                print(
                    f"{moved} bytes: {fast.timings.transfer:.3f} s; at {rate} bit/s "
                    f"{slow.timings.transfer:.3f} s, of which the wire takes {least:.3f} s"
                )
                assert slow.timings.transfer >= least
                answers.append(slow)
        assert fast.timings.transfer < least, "the wire was never what it waited for"
        for answer in answers:
            assert answer.token_ids == expected
            assert answer.placement.kind == "split"
            assert answer.placement.fallback_reason == ""
        await come_home(cluster)


async def test_a_cut_wire_is_noticed_in_time_and_used_again(
    tiny_model: Path, hosts: dict[str, Host]
) -> None:
    expected = await undisturbed(tiny_model)
    wire = hosts[Role.PREFILL]
    async with LocalCluster(far_apart(tiny_model, hosts)) as cluster:
        await cluster.wait_ready()
        (prefill,), (decode,) = (cluster.workers_of(role) for role in Role)
        async with Client(cluster.router_address) as client:
            await ask(client, PROMPT)
            whole = kv_bytes(await scrape(decode.metrics))
            wire.limit(round(whole * 8 / TRANSFER_SECONDS))
            call = asyncio.create_task(ask(client, PROMPT))
            await scrape_until(decode.metrics, lambda m: kv_bytes(m) > whole, "a part of the KV")
            wire.cut()
            began = time.monotonic()
            found = await scrape_until(decode.metrics, stalled, "a link given up")
            noticed = time.monotonic() - began
            await until_closed_at(wire, prefill.metrics, began + PEER_TIMEOUT + 1)
            by_both = time.monotonic() - began
            print(f"noticed after {noticed:.2f} s by the decode worker, {by_both:.2f} s by both")
            assert noticed < PEER_TIMEOUT + 1
            assert whole < kv_bytes(found) < 2 * whole
            answer = await asyncio.wait_for(call, 60)
            assert answer.token_ids == expected
            assert answer.placement.fallback_reason == "stalled"
            assert 0 < answer.placement.decode_computed_prompt_tokens < len(PROMPT)
            wire.mend()
            began = time.monotonic()
            await asyncio.wait_for(cluster.wait_ready(), MENDED_SECONDS)
            print(f"the link was open again after {time.monotonic() - began:.2f} s")
            again = await ask(client, PROMPT)
            assert again.token_ids == expected
            assert again.placement.kind == "split"
            assert again.placement.fallback_reason == ""
        await come_home(cluster)


def kv_bytes(metrics: Metrics) -> int:
    return int(metrics.total("kv_received_bytes_total"))


def stalled(metrics: Metrics) -> bool:
    return metrics.total("kv_transfer_failures_total", reason="stalled") == 1


async def come_home(cluster: LocalCluster) -> None:
    for worker in cluster.workers:
        await assert_no_leaks(worker.metrics)


def kv_connections(pid: int, hosts: dict[str, Host]) -> int:
    """Connections between the link addresses, as the kernel of a process's host shows them."""
    pair = {socket.inet_aton(host.link_address)[::-1].hex().upper() for host in hosts.values()}
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    ends = [{end.partition(":")[0] for end in line.split()[1:3]} for line in lines]
    return ends.count(pair)


async def until_closed_at(host: Host, metrics: str, until: float) -> None:
    """Wait until a worker that only its own host reaches has no open link."""
    page = (
        f"import urllib.request as u; print(u.urlopen('http://{metrics}/metrics').read().decode())"
    )
    while True:
        command = host.program([sys.executable, "-c", page])
        ended = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, check=True, timeout=10
        )
        if not Metrics(ended.stdout).total("links", state="open"):
            return
        assert time.monotonic() < until, "the prefill worker never gave its link up"
