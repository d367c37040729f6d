"""A cluster of real processes on this machine: starts them, watches them, and leaves none behind.

Used by `tasuki up`, by comparisons, and by tests. The life of a cluster:
1. workers start side by side, each on a free port, and say where they listen once warmed up;
2. the router starts with their addresses;
3. `wait_ready` asks the router until it sees every worker ready and, when split, all links open;
4. `stop` sends SIGTERM, waits, sends SIGKILL, and closes the lifeline.
If this process dies without getting that far, the lifeline's end tells the children.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self, TypeVar

from cli.cluster.child import Child, ProcessError
from cli.cluster.cluster_spec import ROUTER, ClusterSpec
from cli.cluster.lifeline import Lifeline
from cli.cluster.readiness import missing_parts
from cli.cluster.ready_line import ReadyLine
from router.config import RouterConfig
from tasuki.config import WorkerConfig, to_args
from tasuki.errors import TasukiError
from tasuki.messages import Role

T = TypeVar("T")

Probe = Callable[[str, int, int], Awaitable[str]]
"""(router address, prefill workers, decode workers) -> what is missing, in words, or nothing."""

PROBE_EVERY = 0.1
KILL_TIMEOUT = 5.0


class LocalCluster:
    """An async context manager: the processes run inside the block and nowhere else.

    Entering raises ProcessError when a process does not start, with its last words.
    """

    def __init__(self, spec: ClusterSpec, *, probe: Probe = missing_parts) -> None:
        self.spec = spec
        self._probe = probe
        self._children: dict[str, Child] = {}
        self._ready: dict[str, ReadyLine] = {}
        self._started: dict[str, tuple[str, WorkerConfig | RouterConfig]] = {}  # role, settings
        self._lifeline: Lifeline | None = None
        self._missing = ""  # what `wait_ready` waits for, in words

    async def __aenter__(self) -> Self:
        self._make_log_dir()
        self._lifeline = Lifeline()
        try:
            await self._within_start_timeout(self._start(), "to start")
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def router(self) -> ReadyLine:
        return self._ready[ROUTER]

    @property
    def routers(self) -> list[ReadyLine]:
        return [self._ready[name] for name in self.spec.router_names()]

    @property
    def router_address(self) -> str:
        return self.router.address

    @property
    def router_addresses(self) -> str:
        """All of them, with commas, as a client takes them."""
        return ",".join(router.address for router in self.routers)

    @property
    def workers(self) -> list[ReadyLine]:
        """All workers, prefill first."""
        return [self._ready[name] for name, _ in self.spec.workers()]

    def workers_of(self, role: Role) -> list[ReadyLine]:
        return [worker for worker in self.workers if worker.role == role]

    async def wait_ready(self) -> None:
        """Wait until the router sees all workers ready and all links open.

        Raises ProcessError when a process ends meanwhile, or when the start-up deadline passes.
        """
        await self._within_start_timeout(self._until_nothing_is_missing(), "to become ready")

    async def wait_death(self) -> str:
        """Wait until a process ends that nobody ended on purpose; says which, and how."""
        return (await self._wait_death()).describe()

    async def wait_loss(self) -> tuple[ReadyLine, str]:
        """The same, of a cluster that has started: which, for `restart`, and how."""
        child = await self._wait_death()
        return self._ready[child.name], child.describe()

    async def _wait_death(self) -> Child:
        waits = {
            asyncio.ensure_future(child.wait()): child
            for child in self._children.values()
            if not child.killed_on_purpose
        }
        try:
            while waits:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    child = waits.pop(future)
                    if not child.killed_on_purpose:
                        return child
            # Whoever ended them all on purpose does not want to hear of it.
            never: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
            return await never
        finally:
            await _cancel(*waits)

    def kill(self, process: ReadyLine, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one process's server, on purpose: `wait_death` stays silent about it."""
        child = self._child_of(process)
        child.killed_on_purpose = True
        child.send_signal(number)

    async def wait_exit(self, process: ReadyLine) -> int:
        """Wait until one process has ended; its exit code, or minus the number of the signal."""
        return await self._child_of(process).wait()

    async def restart(self, process: ReadyLine, **changes: Any) -> ReadyLine:
        """Start a process that has ended, or is ending, anew on the same ports, with these settings
        changed from now on.

        Raises ProcessError when it does not start, or does not end within KILL_TIMEOUT.
        """
        name = self._name_of(process)
        child, (role, config) = self._children[name], self._started[name]
        child.killed_on_purpose = True
        if left := await child.end(KILL_TIMEOUT):
            raise ProcessError(f"processes {left} of {name} did not end within {KILL_TIMEOUT:g} s")
        port, metrics_port = (
            int(at.rpartition(":")[2]) for at in (process.address, process.metrics)
        )
        config = dataclasses.replace(config, port=port, metrics_port=metrics_port, **changes)
        await self._spawn(name, role, config)
        await self._within_start_timeout(self._wait_child(name), "to start again")
        return self._ready[name]

    def kill_all(self) -> None:
        """End everything at once, without a word to anyone; `stop` is then quick."""
        for child in self._children.values():
            child.kill()

    async def stop(self) -> None:
        """Ask all processes to end, wait `stop_timeout`, end the rest by force. Idempotent.

        Raises ProcessError naming processes that even SIGKILL did not end.
        """
        if self._lifeline is None:
            return
        children = list(self._children.values())
        for child in children:
            child.send_signal(signal.SIGTERM)
        try:
            await _wait_all(children, self.spec.stop_timeout)
        finally:
            self.kill_all()
            self._lifeline.close()
            self._lifeline = None
            self._children.clear()
            left = await asyncio.gather(*(child.end(KILL_TIMEOUT) for child in children))
        if any(left):
            pids = ", ".join(str(pid) for group in left for pid in group)
            raise ProcessError(f"processes {pids} did not end within {KILL_TIMEOUT:g} s of SIGKILL")

    def _make_log_dir(self) -> None:
        if self.spec.log_dir is None:
            return
        try:
            self.spec.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ProcessError(f"no logs can be written to {self.spec.log_dir}: {error}") from error

    async def _start(self) -> None:
        workers = self.spec.workers()
        for name, role in workers:
            await self._spawn(name, role, self.spec.worker_config(name))
        await self._unless_one_dies(_all(*(self._wait_child(name) for name, _ in workers)))
        addresses = {
            role: [self._ready[name].address for name, other in workers if other is role]
            for role in Role
        }
        for name in self.spec.router_names():
            config = self.spec.router_config(addresses[Role.PREFILL], addresses[Role.DECODE], name)
            await self._spawn(name, ROUTER, config)
        routers = self.spec.router_names()
        await self._unless_one_dies(_all(*(self._wait_child(name) for name in routers)))

    async def _spawn(self, name: str, role: str, config: WorkerConfig | RouterConfig) -> None:
        assert self._lifeline is not None, "only a cluster that was entered starts processes"
        self._started[name] = (role, config)
        args = to_args(config)
        self._children[name] = await Child.start(
            name,
            [*self.spec.program(role), *args],
            lifeline=self._lifeline,
            env=self.spec.environment(),
            log_dir=self.spec.log_dir,
        )

    async def _wait_child(self, name: str) -> None:
        self._ready[name] = await self._children[name].wait_ready()

    async def _until_nothing_is_missing(self) -> None:
        await self._unless_one_dies(self._poll())

    async def _poll(self) -> None:
        self._missing = "an answer from the router"
        while self._missing:
            with contextlib.suppress(TasukiError):  # it may be starting, or ending, just now
                self._missing = await self._probe(
                    self.router_address, self.spec.prefill, self.spec.decode
                )
            if self._missing:
                await asyncio.sleep(PROBE_EVERY)

    async def _unless_one_dies(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`; raise ProcessError at once when a process ends before it is done."""
        task, death = asyncio.ensure_future(work), asyncio.ensure_future(self.wait_death())
        try:
            await asyncio.wait((task, death), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ProcessError(death.result())
            return task.result()
        finally:
            await _cancel(task, death)

    async def _within_start_timeout(self, work: Coroutine[Any, Any, None], what: str) -> None:
        try:
            await asyncio.wait_for(work, self.spec.start_timeout)
        except TimeoutError:
            raise ProcessError(self._late(what)) from None

    def _late(self, what: str) -> str:
        late = [name for name in self._children if name not in self._ready]
        missing = self._missing or f"a word from {', '.join(late)}"
        words = [f"{name}:\n{tail}" for name in late if (tail := self._children[name].log_tail())]
        head = f"the cluster had {self.spec.start_timeout:g} s {what}; still missing: {missing}"
        return "\n".join([head, *words])

    def _child_of(self, process: ReadyLine) -> Child:
        return self._children[self._name_of(process)]

    def _name_of(self, process: ReadyLine) -> str:
        return next(name for name, ready in self._ready.items() if ready.address == process.address)


async def _wait_all(children: list[Child], seconds: float) -> None:
    waits = [asyncio.ensure_future(child.wait()) for child in children]
    if waits:
        try:
            await asyncio.wait(waits, timeout=seconds)
        finally:
            await _cancel(*waits)


async def _all(*work: Coroutine[Any, Any, None]) -> None:
    """Await all of `work`; raise the first failure at once and give the others up."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        for task in asyncio.as_completed(tasks):
            await task
    finally:
        await _cancel(*tasks)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs, and wait until it has stopped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
