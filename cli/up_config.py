"""The settings of `tasuki up`, and what combinations of them make sense. Starts nothing."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.cluster.cluster_spec import LOOPBACK, ClusterSpec
from router.config import RouterConfig
from tasuki.config import (
    WorkerConfig,
    build,
    flag_name,
    given_names,
    open_config_file,
    setting,
)
from tasuki.config_file import ConfigFile
from tasuki.engine.affinity import parse_cpus
from tasuki.errors import ConfigError

DEFAULT_PORT = 50051
PER_PROCESS = {"model", "host", "port", "metrics_port", "worker_id", "cpus"}  # `up` decides these


def same_as(cls: type[Any], name: str) -> Any:
    """A setting that is handed on: default, help and choices are the receiving process's own."""
    (original,) = (field for field in dataclasses.fields(cls) if field.name == name)
    return dataclasses.field(default=original.default, metadata=original.metadata)


@dataclass(frozen=True, kw_only=True)
class UpConfig:
    """Every flag of `tasuki up`. Times are seconds unless the name says otherwise."""

    model: str = setting(
        "auto",
        "demo: a small chat model, obtained once; tiny: random weights, made in a second; auto: "
        "demo, or tiny when demo cannot be had; or a model directory, a .gguf file, or owner/name "
        "on a hub.",
        metavar="auto|demo|tiny|MODEL",
    )
    config: str = setting(
        "", "YAML file with settings of all processes; flags and environment win.", metavar="FILE"
    )
    dtype: str = same_as(WorkerConfig, "dtype")
    device: str = same_as(WorkerConfig, "device")
    connector: str = same_as(WorkerConfig, "connector")
    native: bool = same_as(WorkerConfig, "native")
    prefill: int | None = setting(None, "Prefill workers; 1 when nothing is said.", metavar="N")
    decode: int | None = setting(None, "Decode workers; 1 when nothing is said.", metavar="M")
    colocated: int = setting(
        0,
        "This many decode workers and no prefill worker: each computes its own prompts.",
        metavar="N",
    )
    port: int = setting(DEFAULT_PORT, "The router's gRPC port; 0 takes a free one.")
    threads: int = setting(1, "Compute threads of each worker.", metavar="T")
    cpus: str = setting(
        "",
        "Cores to hand out, such as 0,2-3: --threads of them per worker, in turn.",
        metavar="LIST",
    )
    json: bool = setting(False, "When ready, print one line of JSON and nothing else on stdout.")
    demonstrate: bool = setting(False, "When ready, ask one question and show the answer.")
    log_dir: str = setting("", "Directory for one log per process. Empty: stderr.", metavar="DIR")
    start_timeout: float = setting(180.0, "Time for all processes to become ready.")
    stop_timeout: float = setting(10.0, "Time for all processes to end before they are killed.")
    process_restarts: int = setting(
        5, "Deaths of processes within a minute that are mended by new ones; 0: stop at the first."
    )
    die_with_parent: int = setting(
        0, "Process id of the parent; stop when it ends, even by SIGKILL. 0: do not.", metavar="PID"
    )
    block_size: int = same_as(WorkerConfig, "block_size")
    kv_blocks: int = same_as(WorkerConfig, "kv_blocks")
    kv_cache_memory: str = same_as(WorkerConfig, "kv_cache_memory")
    max_num_batched_tokens: int = same_as(WorkerConfig, "max_num_batched_tokens")
    split_min_tokens: int = same_as(RouterConfig, "split_min_tokens")
    slo_ttft_ms: float = same_as(RouterConfig, "slo_ttft_ms")
    slo_tpot_ms: float = same_as(RouterConfig, "slo_tpot_ms")

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("--model is empty; expected auto, demo, tiny or a model")
        for name in ("prefill", "colocated", "kv_blocks", "process_restarts", "die_with_parent"):
            self._at_least(name, 0)
        for name in ("decode", "threads", "block_size"):
            self._at_least(name, 1)
        if not 0 <= self.port <= 65535:
            raise ConfigError(
                f"--port is {self.port}; expected 0 to 65535, where 0 takes a free one"
            )
        for name in ("start_timeout", "stop_timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                given = getattr(self, name)
                raise ConfigError(f"{flag_name(name)} is {given}; expected seconds above 0")
        self._one_layout()
        parse_cpus(self.cpus)

    def _of_roles(
        self, handed_on: Mapping[str, Any], env: Mapping[str, str], file: ConfigFile
    ) -> dict[str, dict[str, Any]]:
        """By worker, what the file says of its role alone and nobody overrules."""
        overrides: dict[str, dict[str, Any]] = {}
        for role, count in (("prefill", self.num_prefill), ("decode", self.num_decode)):
            values = file.values(WorkerConfig, role)
            config = build(WorkerConfig, handed_on, env, values)
            own = {name: getattr(config, name) for name in values.keys() - PER_PROCESS}
            overrides |= {f"{role}-{number}": own for number in range(count)}
        return overrides

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is not None and value < least:
            raise ConfigError(f"{flag_name(name)} is {value}; expected {least} or more")

    def _one_layout(self) -> None:
        if not self.colocated:
            return
        for name in ("prefill", "decode"):
            if getattr(self, name):
                raise ConfigError(
                    f"--colocated {self.colocated} and {flag_name(name)} {getattr(self, name)} are "
                    "both given; colocated means decode workers only, so give one or the other"
                )

    @property
    def num_prefill(self) -> int:
        return 0 if self.colocated else 1 if self.prefill is None else self.prefill

    @property
    def num_decode(self) -> int:
        return self.colocated or (1 if self.decode is None else self.decode)

    def spec(self, model: Path, env: Mapping[str, str] | None = None) -> ClusterSpec:
        """The cluster that these settings describe, on a model directory.

        Settings of workers and router that were not given to `tasuki up` come from the environment,
        then from their sections of the file. Raises ConfigError for one that cannot be used.
        """
        env = os.environ if env is None else env
        file = open_config_file(self.config, {})
        handed_on = {name: getattr(self, name) for name in given_names(self)}
        # The router starts after the workers; until then its list of them is a place holder.
        known = {"decode_workers": f"{LOOPBACK}:1", "prefill_workers": ""}
        worker = build(
            WorkerConfig,
            handed_on | {"model": ""},
            env,
            file.values(WorkerConfig, "worker") if file else None,
        )
        return ClusterSpec(
            model=model,
            prefill=self.num_prefill,
            decode=self.num_decode,
            port=self.port,
            threads=worker.threads,  # ours, where we were given any
            cpus=parse_cpus(self.cpus),
            worker=worker,
            router=build(
                RouterConfig,
                handed_on | known | {"model": ""},
                env,
                file.values(RouterConfig, "router") if file else None,
            ),
            overrides=self._of_roles(handed_on, env, file) if file else {},
            log_dir=Path(self.log_dir) if self.log_dir else None,
            start_timeout=self.start_timeout,
            stop_timeout=self.stop_timeout,
        )
