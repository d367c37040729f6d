"""`tasuki compare --quick`: the same requests on a split and on a colocated cluster."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from cli.cluster.cluster_spec import ClusterSpec
from cli.cluster.local_cluster import LocalCluster
from cli.command import Command
from cli.interrupts import run_interruptible
from cli.kernels import prepare_kernels
from cli.model_directory import obtain_model
from cli.say import say
from experiments.quick import QuickComparison
from experiments.record import Record
from tasuki.config import setting
from tasuki.errors import ConfigError
from tasuki.slo import Slo

HELP = """\
Replays 60 requests of a real trace twice, each time with two workers on one core each: first on
one prefill and one decode worker, then on two workers that do both. Same prompts, same arrival
times, sent on schedule whatever happened before. Prints both side by side.

  tasuki compare --quick                     with the demo model, two to three minutes
  tasuki compare --quick --model tiny        with random weights
  tasuki compare --quick --json > runs.json  every request's record
"""

ARMS = {"split (1 prefill + 1 decode)": (1, 1), "colocated (2)": (0, 2)}


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Every flag of `tasuki compare`."""

    quick: bool = setting(False, "The quick comparison; there is no other yet.")
    model: str = setting(
        "auto", "As for `tasuki up`.", metavar="auto|demo|tiny|MODEL"
    )  # fmt: skip
    time_scale: float = setting(4.0, "Stretches the trace's arrival times.")
    slo_ttft_ms: float = setting(1000.0, "What counts as a good time to first token.")
    slo_tpot_ms: float = setting(100.0, "What counts as a good time per output token.")
    seed: int = setting(0, "Which places of the text the prompts are cut from.")
    json: bool = setting(False, "Print every record as JSON instead of the table.")

    def __post_init__(self) -> None:
        if not self.quick:
            raise ConfigError("compare needs --quick, the only comparison there is so far")
        for name in ("time_scale", "slo_ttft_ms", "slo_tpot_ms"):
            if not 0 < getattr(self, name) < float("inf"):
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} is {getattr(self, name)}; expected a number above 0")


class CompareRun:
    """One run of the command: `serve` it, and `kill_all` when there is no time left."""

    def __init__(self, config: CompareConfig) -> None:
        self._config = config
        self._cluster: LocalCluster | None = None

    async def serve(self) -> None:
        config = self._config
        model = await obtain_model(config.model)
        await prepare_kernels()
        slo = Slo(ttft=config.slo_ttft_ms / 1000, tpot=config.slo_tpot_ms / 1000)
        comparison = QuickComparison.prepare(
            model, slo, time_scale=config.time_scale, seed=config.seed
        )
        say(f"Replaying {comparison.describe()} with model {model.name}.")
        arms: dict[str, list[Record]] = {}
        for name, (prefill, decode) in ARMS.items():
            arms[name] = await self._run_arm(comparison, name, spec(model, prefill, decode))
        print(as_json(arms) if config.json else comparison.report(arms), flush=True)

    async def _run_arm(
        self, comparison: QuickComparison, name: str, spec: ClusterSpec
    ) -> list[Record]:
        say(f"Starting {name} on cores {', '.join(map(str, spec.cpus))}.")
        self._cluster = LocalCluster(spec)
        async with self._cluster as cluster:
            await cluster.wait_ready()
            return await comparison.run_arm(cluster.router_address)

    def kill_all(self) -> None:
        """End every process of the cluster at once."""
        if self._cluster is not None:
            self._cluster.kill_all()


def spec(model: Path, prefill: int, decode: int) -> ClusterSpec:
    """Two workers on one core each; with a single core they share it, in both arms alike."""
    cpus = tuple(sorted(os.sched_getaffinity(0))[:2])
    log_dir = Path("build/logs") if Path("build").is_dir() else None
    return ClusterSpec(model=model, prefill=prefill, decode=decode, cpus=cpus, log_dir=log_dir)


def as_json(arms: Mapping[str, list[Record]]) -> str:
    return json.dumps({name: [asdict(record) for record in arms[name]] for name in arms})


def run_compare(config: CompareConfig) -> int:
    """Run the command; returns the exit code. Raises TasukiError."""
    run = CompareRun(config)
    return asyncio.run(run_interruptible(run.serve(), run.kill_all))


COMPARE = Command(
    name="compare",
    summary="replay the same requests on a split and a colocated cluster",
    help=HELP,
    config=CompareConfig,
    run=run_compare,
)
