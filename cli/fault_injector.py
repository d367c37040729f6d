"""Strikes a local cluster with faults, notes what they hit, and mends what they broke."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

from cli.cluster.local_cluster import LocalCluster
from cli.cluster.ready_line import ReadyLine
from cli.counters import gauge, scrape
from cli.say import say
from experiments.chaos.schedule import Fault, FaultKind, Part, PlannedFault
from experiments.chaos.tally import STATES, Tally
from tasuki.client import Client
from tasuki.errors import TasukiError
from tasuki.messages import Role
from tasuki.server.grpc_server import internal_channel
from tasuki.v1 import worker_pb2, worker_pb2_grpc

CALL_SECONDS = 5.0
LOOK_SECONDS = 0.05
AIM_LOOKS = 40
READY_SECONDS = 60.0
CORRUPTED = 3  # segments
SLOW = 100_000.0  # bytes per second


class FaultInjector:
    """One fault at a time for each role, so that there is always somebody left to go on."""

    def __init__(self, cluster: LocalCluster, tally: Tally, usual_bandwidth: float) -> None:
        self._cluster = cluster
        self._tally = tally
        self._usual_bandwidth = usual_bandwidth  # bytes per second; 0: no limit
        self._whole = {role: asyncio.Lock() for role in ("router", "prefill", "decode")}

    async def strike(self, planned: PlannedFault) -> None:
        """Wait until all processes of the role are whole; strike; mend; wait again."""
        fault = planned.fault
        async with self._whole[fault.role]:
            victims = self._processes(fault.role)
            victim = victims[planned.pick % len(victims)]
            await self._aim(fault, victim)
            self._tally.kinds[fault.kind] += 1
            say(f"{fault.kind} {fault.part} of {victim.worker_id or victim.address}")
            watching = asyncio.ensure_future(self._note_states(fault, victim))
            try:
                await self._act(fault, victim, planned.seconds)
                await self._until_ready(victim)
            finally:
                watching.cancel()

    async def limit_bandwidth(self, worker: ReadyLine, bytes_per_second: float) -> None:
        await self._inject(worker, "slow", bytes_per_second)

    def _processes(self, role: str) -> list[ReadyLine]:
        return self._cluster.routers if role == "router" else self._cluster.workers_of(Role(role))

    async def _aim(self, fault: Fault, victim: ReadyLine) -> None:
        """Wait a moment for a handoff to be in the state that was hit least often so far."""
        wanted = min(STATES, key=self._tally.states.__getitem__)
        for _ in range(AIM_LOOKS if fault.role != "router" else 0):
            if wanted in await self._states(fault, victim):
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def _note_states(self, fault: Fault, victim: ReadyLine) -> None:
        """Which states handoffs are in from just before the fault until it is mended."""
        seen: set[str] = set()
        while True:
            now = await self._states(fault, victim)
            self._tally.states.update(now - seen)
            seen |= now
            await asyncio.sleep(LOOK_SECONDS)

    async def _states(self, fault: Fault, victim: ReadyLine) -> set[str]:
        """Those of handoffs on a decode worker that is hit, or on all of them when a prefill worker
        is; a router has none.
        """
        found: set[str] = set()
        hit = [victim] if fault.role == "decode" else self._processes("decode")
        for worker in hit if fault.role != "router" else ():
            with contextlib.suppress(OSError, TimeoutError):
                page = await scrape(worker.metrics)
                found.update(state for state in STATES if gauge(page, "handoffs", state=state))
        return found

    # --- what is done ---------------------------------------------------------------------------

    async def _act(self, fault: Fault, victim: ReadyLine, seconds: float) -> None:
        match fault.kind:
            case FaultKind.KILL:
                await self._kill(fault, victim)
            case FaultKind.STOP:
                await self._stop(victim, seconds)
            case FaultKind.RESTART:
                await self._restart(victim)
            case FaultKind.SLOW:
                await self._inject(victim, "slow", SLOW)
                await asyncio.sleep(seconds)
                await self._inject(victim, "slow", self._usual_bandwidth)
            case FaultKind.CUT:
                await self._inject(victim, "cut", 0.0)
            case FaultKind.CORRUPT:
                await self._inject(victim, "corrupt", CORRUPTED)

    async def _kill(self, fault: Fault, victim: ReadyLine) -> None:
        if fault.part is Part.ENGINE:
            await self._signal_engine(victim, signal.SIGKILL)
        else:
            self._cluster.kill(victim)
            await self._cluster.restart(victim)

    async def _stop(self, victim: ReadyLine, seconds: float) -> None:
        pid = await self._signal_engine(victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    async def _restart(self, victim: ReadyLine) -> None:
        self._cluster.kill(victim, signal.SIGTERM)
        async with asyncio.timeout(READY_SECONDS):
            await self._cluster.wait_exit(victim)
        await self._cluster.restart(victim)

    # --- how ------------------------------------------------------------------------------------

    async def _signal_engine(self, victim: ReadyLine, number: signal.Signals) -> int:
        """The engine's process id; 0 when it was gone already."""
        with contextlib.suppress(TasukiError, ProcessLookupError):
            async with Client(victim.address, resubmit_seconds=0.0) as client:
                pid = (await client.server_info(timeout=CALL_SECONDS)).engine_pid
            os.kill(pid, number)
            return pid
        return 0

    async def _inject(self, worker: ReadyLine, kind: str, amount: float) -> None:
        """Into the engine of now; one that is being started has no links yet."""
        request = worker_pb2.InjectFaultRequest(kind=kind, amount=amount)
        async with internal_channel(worker.address) as channel:
            with contextlib.suppress(Exception):
                stub = worker_pb2_grpc.WorkerStub(channel)
                await stub.InjectFault(request, timeout=CALL_SECONDS)

    async def _until_ready(self, victim: ReadyLine) -> None:
        """All of the cluster is there again, with every link open; what was limited is so again."""
        await self._cluster.wait_ready()
        if victim.role == Role.PREFILL and self._usual_bandwidth:
            await self.limit_bandwidth(victim, self._usual_bandwidth)
