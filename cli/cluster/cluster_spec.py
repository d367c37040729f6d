"""What a cluster on this machine consists of, as data, and the settings each process gets."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cli.cluster.cpu_list import share
from router.config import RouterConfig
from tasuki.config import WorkerConfig, without_settings
from tasuki.engine.affinity import format_cpus
from tasuki.messages import Role

LOOPBACK = "127.0.0.1"
ROUTER = "router"

_ROOT = Path(__file__).resolve().parents[2]


def module_program(role: str) -> list[str]:
    """The command that starts one process of a role: `python -m router`, and so on.

    `-P` keeps a file named decode.py in the user's working directory from being taken for ours.
    """
    return [sys.executable, "-P", "-m", role]


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """How many workers of which kind, on which cores, with which settings.

    `worker` and `router` are templates: addresses, names, cores and descriptors are filled in per
    process. `overrides` changes settings of single workers, by name: {"prefill-0": {...}}.
    Timeouts are seconds.
    """

    model: Path
    prefill: int = 1
    decode: int = 1
    routers: int = 1
    port: int = 0  # of the first router
    threads: int = 1
    cpus: tuple[int, ...] = ()
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    router: RouterConfig = field(
        # The worker lists are filled in once the workers have said where they listen.
        default_factory=lambda: RouterConfig(decode_workers=f"{LOOPBACK}:1")
    )
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    log_dir: Path | None = None
    start_timeout: float = 180.0
    stop_timeout: float = 10.0
    program: Callable[[str], list[str]] = module_program

    def workers(self) -> list[tuple[str, Role]]:
        """Name and role of every worker, in the order in which cores are dealt."""
        roles = [(Role.PREFILL, self.prefill), (Role.DECODE, self.decode)]
        return [(f"{role}-{number}", role) for role, count in roles for number in range(count)]

    def router_names(self) -> list[str]:
        return [ROUTER, *(f"{ROUTER}-{number}" for number in range(1, self.routers))]

    def worker_config(self, name: str) -> WorkerConfig:
        """The settings of one worker."""
        index = [worker for worker, _ in self.workers()].index(name)
        config = replace(
            self.worker,
            model=str(self.model),
            host=LOOPBACK,
            port=0,
            metrics_port=0,
            worker_id=name,
            threads=self.threads,
            cpus=format_cpus(share(self.cpus, index, self.threads)),
        )
        config = replace(config, **self.overrides.get(name, {}))
        return replace(config, drain_timeout=self._drain_timeout(config.drain_timeout))

    @property
    def wants_kernels(self) -> bool:
        """Whether any worker is to compute with compiled kernels."""
        return any(self.worker_config(name).native for name, _ in self.workers())

    def without_kernels(self) -> ClusterSpec:
        """The same cluster where none can be compiled."""
        overrides = {
            name: {**self.overrides.get(name, {}), "native": False} for name, _ in self.workers()
        }
        return replace(self, overrides=overrides)

    def router_config(
        self, prefill: list[str], decode: list[str], name: str = ROUTER
    ) -> RouterConfig:
        """The settings of a router, given the workers' addresses."""
        return replace(
            self.router,
            model=str(self.model),
            host=LOOPBACK,
            port=self.port if name == ROUTER else 0,
            prefill_workers=",".join(prefill),
            decode_workers=",".join(decode),
            drain_timeout=self._drain_timeout(self.router.drain_timeout),
        )

    def _drain_timeout(self, wanted: float) -> float:
        # Half, so that a process that drains to the end still has time to close before SIGKILL.
        return min(wanted, self.stop_timeout / 2)

    def environment(self) -> dict[str, str]:
        """What children inherit: ours, less every setting, for each child gets its own as flags."""
        env = without_settings(os.environ, WorkerConfig, RouterConfig)
        env["OMP_NUM_THREADS"] = str(self.threads)
        if _ROOT.name not in ("site-packages", "dist-packages"):
            # A checkout need not be installed to be started.
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), env.get("PYTHONPATH"))))
        return env
