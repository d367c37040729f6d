"""`tasuki chaos`: a cluster under load and under faults, and what became of every request."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.cluster.cluster_spec import ClusterSpec, module_program
from cli.cluster.local_cluster import LocalCluster
from cli.command import Command
from cli.counters import Counters, blocks_held, scrape
from cli.fault_injector import FaultInjector
from cli.interrupts import run_interruptible
from cli.kernels import prepare_kernels
from cli.model_directory import obtain_model
from cli.say import say
from experiments.chaos.load import ask_once, keep_asking
from experiments.chaos.requests import Ask, draw_requests
from experiments.chaos.schedule import EVERY_FAULT, Fault, plan
from experiments.chaos.tally import Tally
from router.config import RouterConfig
from tasuki.cache_root import cache_root
from tasuki.client import Client
from tasuki.config import WorkerConfig, setting
from tasuki.errors import ConfigError, TasukiError
from tasuki.messages import Role

HELP = """\
Starts a cluster here, keeps it under load, and strikes it with faults drawn from a seed: kills,
stops, restarts, cuts, slow and corrupting links. Every answer is compared with that of a cluster
nothing happened to (kept for the next run). Prints what was lost, duplicated, changed or leaked:
each should be 0. Exit code 1 when one is not, or when some kind of fault, or some state of a
handoff, was never hit: a run goes on for as long again at most while one is missing.

  tasuki chaos --duration 60
  tasuki chaos --model demo --seed 7 --json
"""

POLL_SECONDS = 0.25
HOME_SECONDS = 30.0
BANDWIDTH = 3_000_000.0  # bytes per second of a prefill worker's links: so that transfers take time
SMALL_MODEL = "tiny"


@dataclass(frozen=True, kw_only=True)
class ChaosConfig:
    """Every flag of `tasuki chaos`. Times are seconds."""

    model: str = setting(SMALL_MODEL, "Model as for `tasuki up`.", metavar="MODEL")
    seed: int = setting(0, "What the faults and the load are drawn from.")
    duration: float = setting(
        60.0, "Seconds of load under faults; for as long again while something was never hit."
    )
    requests: int = setting(0, "Stop after so many requests; 0: after --duration.")
    prefill: int = setting(2, "Prefill workers.")
    decode: int = setting(2, "Decode workers.")
    routers: int = setting(2, "Routers.")
    clients: int = setting(12, "Clients, each with one request at a time.")
    json: bool = setting(False, "Print one line of JSON on stdout; all else goes to stderr.")

    def __post_init__(self) -> None:
        for name in ("prefill", "decode", "routers", "clients"):
            if not 1 <= getattr(self, name) <= 64:
                raise ConfigError(f"--{name} is {getattr(self, name)}; expected 1 to 64")
        if not 0 < self.duration <= 86_400:
            raise ConfigError(f"--duration is {self.duration}; expected more than 0, at most 86400")
        if self.requests < 0:
            raise ConfigError(f"--requests is {self.requests}; expected 0 or more")


Beside = Callable[[LocalCluster], Coroutine[Any, Any, None]]
"""What runs beside the load, from its first request on; cancelled when the load has ended."""


class ChaosRun:
    def __init__(
        self,
        config: ChaosConfig,
        faults: Sequence[Fault] = EVERY_FAULT,
        beside: Beside | None = None,
    ) -> None:
        self._config = config
        self._faults = faults
        self._beside = beside
        self._tally = Tally()
        self._counters = Counters()
        self._clusters: list[LocalCluster] = []

    async def serve(self) -> None:
        """Run it all; `tally` is complete afterwards."""
        config = self._config
        model = await obtain_model(config.model, module_program("tasuki.convert"))
        spec = chaos_spec(model, config)
        if spec.wants_kernels and not await prepare_kernels():
            spec = spec.without_kernels()
        async with self._cluster(spec) as cluster:
            await cluster.wait_ready()
            asks = await self._draw(cluster)
            expected = await self._undisturbed(spec, cluster, asks)
            injector = FaultInjector(cluster, self._tally, BANDWIDTH)
            for worker in cluster.workers_of(Role.PREFILL):
                await injector.limit_bandwidth(worker, BANDWIDTH)
            say(f"{config.clients} clients, faults from seed {config.seed}:")
            await self._under_faults(cluster, injector, asks, expected)
            await cluster.wait_ready()
            self._tally.leaked = await self._leaked(cluster)
        self._tally.migrated = self._counters.total("migrations_total")
        self._tally.fell_back = self._counters.total("fallbacks_total")

    @property
    def tally(self) -> Tally:
        return self._tally

    def kill_all(self) -> None:
        for cluster in self._clusters:
            cluster.kill_all()

    def _cluster(self, spec: ClusterSpec) -> LocalCluster:
        cluster = LocalCluster(spec)
        self._clusters.append(cluster)
        return cluster

    async def _draw(self, cluster: LocalCluster) -> list[Ask]:
        async with Client(cluster.router_address) as client:
            most = (await client.model_info()).max_model_len
        return draw_requests(self._config.seed, most)

    # --- what each request must answer ----------------------------------------------------------

    async def _undisturbed(
        self, spec: ClusterSpec, cluster: LocalCluster, asks: list[Ask]
    ) -> list[list[list[int]]]:
        """From an earlier run of the same configuration, or from a cluster of one worker."""
        async with Client(cluster.workers[0].address) as client:
            facts = (await client.server_info()).facts
        path = cache_root(os.environ) / "chaos" / f"{digest(facts, asks)}.json"
        with contextlib.suppress(OSError, ValueError):
            found: list[list[list[int]]] = json.loads(path.read_text())
            return found
        say("Asking a cluster to which nothing happens.")
        quiet = dataclasses.replace(spec, prefill=0, decode=1, routers=1)
        async with self._cluster(quiet) as alone:
            await alone.wait_ready()
            async with Client(alone.router_address) as client:
                answers = [await ask_once(client, ask) for ask in asks]
        for answer in answers:
            if answer.error:
                raise TasukiError(f"an undisturbed request failed: {answer.error}")
        samples = [answer.samples for answer in answers]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(samples))
        return samples

    # --- load and faults --------------------------------------------------------------------------

    async def _under_faults(
        self,
        cluster: LocalCluster,
        injector: FaultInjector,
        asks: list[Ask],
        expected: list[list[list[int]]],
    ) -> None:
        config, clock = self._config, asyncio.get_running_loop().time
        end = clock() + config.duration
        last = end + (config.duration if self._faults == EVERY_FAULT else 0.0)

        def enough() -> bool:
            if config.requests:
                return self._tally.requests >= config.requests
            return clock() >= (last if self._tally.missed else end)

        async with asyncio.TaskGroup() as helpers:
            beside = [helpers.create_task(self._poll(cluster))]
            if self._beside is not None:
                beside.append(helpers.create_task(self._beside(cluster)))
            striking = helpers.create_task(self._strike(injector, enough))
            async with contextlib.AsyncExitStack() as stack:
                clients = [
                    await stack.enter_async_context(Client(targets, resubmit_seconds=60.0))
                    for targets in rotations(cluster.router_addresses)
                ]
                rngs = [random.Random(f"{config.seed} {one}") for one in range(config.clients)]
                await asyncio.gather(
                    *(
                        keep_asking(client, asks, expected, self._tally, rng, enough)
                        for client, rng in zip(itertools.cycle(clients), rngs, strict=False)
                    )
                )
            await striking
            await self._poll_once(cluster)
            for task in beside:
                task.cancel()

    async def _strike(self, injector: FaultInjector, enough: object) -> None:
        assert callable(enough)
        begin = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as strikes:
            for planned in plan(self._config.seed, self._faults):
                pause = begin + planned.at - asyncio.get_running_loop().time()
                while pause > 0 and not enough():
                    await asyncio.sleep(min(pause, POLL_SECONDS))
                    pause = begin + planned.at - asyncio.get_running_loop().time()
                if enough():
                    return
                strikes.create_task(injector.strike(planned))

    async def _poll(self, cluster: LocalCluster) -> None:
        while True:
            await self._poll_once(cluster)
            await asyncio.sleep(POLL_SECONDS)

    async def _poll_once(self, cluster: LocalCluster) -> None:
        for process in itertools.chain(cluster.routers, cluster.workers):
            with contextlib.suppress(OSError, TimeoutError):
                self._counters.take(process.address, await scrape(process.metrics))

    async def _leaked(self, cluster: LocalCluster) -> int:
        """Blocks that are not home a while after the last request, and those counted as leaks."""
        held = ("in_use", "reserved", "quarantined")
        until = asyncio.get_running_loop().time() + HOME_SECONDS
        left = 0
        for worker in cluster.workers:
            while left := blocks_held(await scrape(worker.metrics), held):
                if asyncio.get_running_loop().time() > until:
                    break
                await asyncio.sleep(POLL_SECONDS)
        return left + self._counters.total("kv_block_leaks_total")


def chaos_spec(model: Path, config: ChaosConfig) -> ClusterSpec:
    """Little memory, small chunks and small messages: so that there is much to interrupt."""
    worker = WorkerConfig(
        fault_injection=True,
        engine_restarts=1_000_000,
        max_num_batched_tokens=64,
        segment_bytes=1,  # one block
        kv_blocks=72,
        peer_timeout=2.0,
        handoff_timeout=4.0,
        reserve_timeout=4.0,
        drain_timeout=2.0,
    )
    router = RouterConfig(decode_workers="127.0.0.1:1", report_timeout=2.0, drain_timeout=2.0)
    return ClusterSpec(
        model=model,
        prefill=config.prefill,
        decode=config.decode,
        routers=config.routers,
        worker=worker,
        router=router,
        log_dir=Path("build/logs") if Path("build").is_dir() else None,
    )


def rotations(targets: str) -> list[str]:
    """Each router as the first one of some clients: so that all of them place requests at once."""
    names = targets.split(",")
    return [",".join(names[first:] + names[:first]) for first in range(len(names))]


def digest(facts: object, asks: list[Ask]) -> str:
    """Of everything that the undisturbed answers depend on."""
    assert isinstance(facts, dict)
    known = [facts[name] for name in ("model", "weights_digest", "numerics")]
    root = Path(__file__).resolve().parents[1] / "tasuki"
    sources = [
        path.read_bytes()
        for folder in ("model", "native", "scheduler")
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in (".py", ".cpp", ".h")
    ]
    found = hashlib.sha256(json.dumps([known, [dataclasses.asdict(ask) for ask in asks]]).encode())
    for source in sources:
        found.update(source)
    return found.hexdigest()[:32]


def show_tally(tally: Tally, as_json: bool) -> None:
    result = tally.as_dict()
    if as_json:
        print(json.dumps(result), flush=True)
        return
    faults = result.pop("faults")
    for name, value in result.items():
        print(f"{name:<20} {value}")
    for name, counts in faults.items():
        words = ", ".join(f"{count} {what}" for what, count in counts.items())
        print(f"faults {name:<13} {words}")


def run_chaos(config: ChaosConfig) -> int:
    """Run the command; returns the exit code. Raises TasukiError."""
    run = ChaosRun(config)
    code = asyncio.run(run_interruptible(run.serve(), run.kill_all))
    if code:
        return code
    show_tally(run.tally, config.json)
    if run.tally.missed:
        say(f"Never hit: {', '.join(run.tally.missed)}. Run it for longer, or with another seed.")
    return 0 if run.tally.is_clean and not run.tally.missed else 1


CHAOS = Command(
    name="chaos",
    summary="strike a cluster with faults, and compare every answer",
    help=HELP,
    config=ChaosConfig,
    run=run_chaos,
)
