"""`tasuki up`: a cluster on this machine while the command runs, and what is said of it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TextIO

import msgspec

from cli.answer import Question, stream_answer
from cli.cluster.child import ProcessError
from cli.cluster.cluster_spec import LOOPBACK, module_program
from cli.cluster.free_port import check_port_free
from cli.cluster.local_cluster import LocalCluster, Probe
from cli.cluster.readiness import missing_parts
from cli.command import Command
from cli.interrupts import die_with_parent, run_interruptible
from cli.kernels import prepare_kernels
from cli.model_directory import obtain_model
from cli.say import say, show
from cli.timeline_table import render
from cli.up_config import UpConfig
from tasuki.client import Client
from tasuki.clock import monotonic
from tasuki.server.restarts import RestartBudget

HELP = """\
Starts one router and some workers on this machine, as separate processes on 127.0.0.1, and stays
until Ctrl-C. The first Ctrl-C gives running requests a moment; a second ends everything at once.
A process that dies is started again; its requests go on.

  tasuki up                           one prefill worker, one decode worker, the demo model
  tasuki up --prefill 2 --decode 3    a larger split cluster
  tasuki up --colocated 2             two decode workers, each computes its own prompts
  tasuki up --model ~/models/llama    a Hugging Face directory: Llama, Qwen, Mistral
  tasuki up --port 0 --json           a free port, told in one line of JSON: for scripts
"""

# Long enough (over --split-min-tokens) that a prefill worker computes it and hands it over.
DEMONSTRATION = (
    "In a relay race each runner carries a sash and hands it to the next one. The first runner "
    "covers the long climb at the start, the second one runs the many short steps to the finish, "
    "and the race is lost if the sash is dropped between them. Explain in two or three sentences, "
    "for a child, why two runners who each do what they are good at can be faster than one who has "
    "to do everything alone."
)
DEMONSTRATION_TOKENS = 96


class UpRun:
    """One run of the command: `serve` it, and `kill_all` when there is no time left."""

    def __init__(
        self,
        config: UpConfig,
        *,
        program: Callable[[str], list[str]] = module_program,
        probe: Probe = missing_parts,
    ) -> None:
        self._config = config
        self._program = program
        self._probe = probe
        self._cluster: LocalCluster | None = None

    async def serve(self) -> None:
        """Start everything, say so, and stay; raises ProcessError when too much of it ends."""
        config = self._config
        config.spec(Path())  # before minutes of work: whether all settings can be used
        check_port_free(LOOPBACK, config.port)
        model = await obtain_model(config.model, self._program("tasuki.convert"))
        spec = dataclasses.replace(config.spec(model), program=self._program)
        if spec.wants_kernels and not await prepare_kernels():
            spec = spec.without_kernels()
        say(f"Starting {size(config)} with model {model.name}.")
        self._cluster = LocalCluster(spec, probe=self._probe)
        async with self._cluster as cluster:
            await cluster.wait_ready()
            print(ready_json(cluster) if config.json else ready_text(cluster), flush=True)
            if config.demonstrate:
                out = sys.stderr if config.json else sys.stdout
                await demonstrate(cluster.router_address, out)
            say("Ctrl-C stops it.")
            await keep_whole(cluster, config.process_restarts)

    def kill_all(self) -> None:
        """End every process of the cluster at once."""
        if self._cluster is not None:
            self._cluster.kill_all()


async def keep_whole(cluster: LocalCluster, restarts: int) -> NoReturn:
    """Start again what dies, so often within a minute, as whoever runs a cluster elsewhere does.
    Raises ProcessError for one death too many, or when one does not start again.
    """
    budget = RestartBudget(restarts)
    while True:
        process, how = await cluster.wait_loss()
        if not budget.take(monotonic()):
            raise ProcessError(f"{how}\nEverything is stopped: see --process-restarts")
        say(f"{how}\nIt is started again; its requests go on.")
        await cluster.restart(process)
        say(f"{process.worker_id or 'the router'} is there again.")


def run_up(config: UpConfig) -> int:
    """Run the command until a signal comes; returns the exit code. Raises TasukiError."""
    if config.die_with_parent:
        die_with_parent(config.die_with_parent)
    run = UpRun(config)
    return asyncio.run(run_interruptible(run.serve(), run.kill_all))


def size(config: UpConfig) -> str:
    """The cluster in a few words."""
    parts = [(config.num_prefill, "prefill worker"), (config.num_decode, "decode worker")]
    words = [f"{count} {what}{'s' * (count != 1)}" for count, what in parts if count]
    return ", ".join(["1 router", *words])


def ready_json(cluster: LocalCluster) -> str:
    """One line for scripts; `http` is kept for the OpenAI-compatible door."""
    return json.dumps(
        {
            "router": cluster.router_address,
            "http": None,
            "router_metrics": cluster.router.metrics,
            "workers": [msgspec.to_builtins(worker) for worker in cluster.workers],
        }
    )


def ready_text(cluster: LocalCluster) -> str:
    """Where to connect, for people."""
    address = cluster.router_address
    lines = [f"router      {address:<22} metrics http://{cluster.router.metrics}/metrics"]
    lines += [
        f"{worker.worker_id:<11} {worker.address:<22} metrics http://{worker.metrics}/metrics"
        for worker in cluster.workers
    ]
    lines.append(
        f'\nReady. Ask it:  {command_name()} generate --target {address} "Why is the sky blue?"'
    )
    return "\n".join(lines)


def command_name() -> str:
    """How a person at this terminal would call us."""
    if shutil.which("tasuki"):
        return "tasuki"
    beside = Path(sys.executable).parent / "tasuki"
    if not beside.exists():
        return f"{sys.executable} -m cli"
    here = Path.cwd()
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)


async def demonstrate(router_address: str, out: TextIO) -> None:
    """Ask one question and show the answer as it comes, then where the time went."""
    show(f"\nA demonstration.\n> {DEMONSTRATION}\n\n", out)
    question = Question(prompt=DEMONSTRATION, sampling={"max_tokens": DEMONSTRATION_TOKENS})
    async with Client(router_address) as client:
        answer = await stream_answer(client, question, lambda text: show(text, out))
    show(f"\n\n{render(answer.last)}\n\n", out)


UP = Command(
    name="up",
    summary="start a cluster on this machine",
    help=HELP,
    config=UpConfig,
    run=run_up,
)
