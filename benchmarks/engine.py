"""The engine against transformers on one model, one thread on one core, in one run.

Both are called in process, without a server. Prompts are random tokens, new in every round and the
same for both; a decode goes on from round to round at the same context on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.bench_model import BenchModel, bench_model
from benchmarks.contender import Contender, Prompt
from benchmarks.floor import decode_floor, prefill_floor
from benchmarks.machine import Limits
from benchmarks.pinning import own_cores, pinned
from benchmarks.rounds import Spread, interleave, ratios
from benchmarks.table import markdown, with_range
from benchmarks.tasuki_engine import TasukiEngine
from benchmarks.transformers_model import TransformersModel
from tasuki.model.config import ModelConfig

CONTEXT = 224  # the mean over a decode's rounds
PREFILL = 512
BATCHES = (1, 8)
CHUNKS = (256, 512)  # the first one is a worker's default, and the one that decodes
STEPS = 8  # decode steps per round
ROUNDS = 7
WARM_UP = 1


@dataclass(frozen=True)
class CaseResult:
    name: str
    peer: str  # the faster of theirs
    ours: Spread  # seconds
    theirs: Spread
    ratio: Spread  # of the rounds' own ratios
    floor: float  # seconds; see benchmarks.floor


@dataclass(frozen=True)
class EngineResult:
    model: str
    cases: tuple[CaseResult, ...]
    rounds: int
    limits: Limits
    equal_tokens: int  # greedy tokens of the decodes that both sides agree on
    all_tokens: int


def measure(rounds: int = ROUNDS) -> EngineResult:
    """Raises RuntimeError when the two sides do not compute the same thing."""
    with pinned(own_cores()[1]), bench_model() as model:
        torch.set_num_threads(1)
        return Comparison(model, rounds).run()


class Comparison:
    def __init__(self, model: BenchModel, rounds: int) -> None:
        self._model = model
        self._rounds = rounds
        self._config = ModelConfig.from_directory(model.directory)
        first = TasukiEngine.load(model.directory, CHUNKS[0])
        self._ours = {CHUNKS[0]: first} | {chunk: first.with_chunk(chunk) for chunk in CHUNKS[1:]}
        self._theirs = {
            name: TransformersModel.quietly(model.directory, name) for name in ("sdpa", "eager")
        }
        self._equal = self._all = 0

    def run(self) -> EngineResult:
        limits = Limits.measure()
        cases = [*self._prefill(limits)]
        cases += [self._decode(batch, limits) for batch in BATCHES]
        return EngineResult(
            self._model.name, tuple(cases), self._rounds, limits, self._equal, self._all
        )

    def _prompts(self, count: int, length: int, seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        shape = (count, length)
        prompts: list[list[int]] = torch.randint(
            100, self._config.vocab_size, shape, generator=generator
        ).tolist()
        return prompts

    def _prefill(self, limits: Limits) -> list[CaseResult]:
        names = {f"prefill {PREFILL}, chunk {chunk}": one for chunk, one in self._ours.items()}
        contenders: dict[str, Contender] = {**names, **self._theirs}
        prompts = self._prompts(self._rounds + WARM_UP, PREFILL, seed=1)
        firsts: dict[str, list[int]] = {name: [] for name in contenders}
        runs = {name: prefill_run(one, prompts, firsts[name]) for name, one in contenders.items()}
        times = interleave(runs, self._rounds, WARM_UP)
        if len({tuple(tokens) for tokens in firsts.values()}) != 1:
            raise RuntimeError(f"the first tokens differ; no speed can be compared: {firsts}")
        floor = prefill_floor(self._config, PREFILL, limits.gemm)
        return [self._case(name, times, name, floor) for name in names]

    def _decode(self, batch: int, limits: Limits) -> CaseResult:
        contenders: dict[str, Contender] = {"ours": self._ours[CHUNKS[0]], **self._theirs}
        steps = STEPS * (self._rounds + WARM_UP)
        prompts = self._prompts(batch, max(16, CONTEXT - steps // 2), seed=2)
        for one in contenders.values():
            one.start(prompts, steps)
        runs = {name: partial(one.decode, STEPS) for name, one in contenders.items()}
        times = interleave(runs, self._rounds, WARM_UP)
        said = {name: one.stop() for name, one in contenders.items()}
        name = f"decode, batch {batch}"
        floor = decode_floor(self._config, batch, CONTEXT, limits.gemm, limits.memory_read)
        case = self._case(name, times, "ours", floor)
        self._compare_tokens(said["ours"], said[case.peer])
        return case

    def _case(
        self, name: str, times: Mapping[str, Sequence[float]], ours: str, floor: float
    ) -> CaseResult:
        peer = min(self._theirs, key=lambda peer: Spread.of(times[peer]).median)
        ratio = Spread.of(ratios(times[peer], times[ours]))
        return CaseResult(name, peer, Spread.of(times[ours]), Spread.of(times[peer]), ratio, floor)

    def _compare_tokens(self, ours: list[list[int]], theirs: list[list[int]]) -> None:
        """Not required to be equal: at a near tie a rounding decides, and the streams part."""
        for mine, other in zip(ours, theirs, strict=True):
            length = min(len(mine), len(other))
            self._all += length
            self._equal += sum(a == b for a, b in zip(mine[:length], other[:length], strict=True))


def prefill_run(
    contender: Contender, prompts: Sequence[Prompt], tokens: list[int]
) -> Callable[[], float]:
    """Each call computes the next prompt, notes its first token in `tokens`, returns seconds."""
    rest = iter(prompts)

    def run() -> float:
        found = contender.prefill(next(rest))
        tokens.append(found.token_id)
        return found.seconds

    return run


def report(result: EngineResult) -> str:
    rows = [
        [
            case.name,
            f"{1000 * case.ours.median:.1f}",
            f"{1000 * case.theirs.median:.1f} ({case.peer})",
            with_range(case.ratio),
            f"{1000 * case.floor:.1f}",
        ]
        for case in result.cases
    ]
    header = [
        f"{result.model}, float32, one thread",
        "ours, ms",
        "transformers, ms (its faster attention)",
        "ratio, median (range)",
        "this machine's floor, ms",
    ]
    limits = result.limits
    notes = (
        f"{result.rounds} rounds; decode is per step, at a context of about {CONTEXT}. Greedy "
        f"tokens that both sides agree on: {result.equal_tokens} of {result.all_tokens}, and all "
        "first tokens. Limits of this machine, one thread: memory read "
        f"{limits.memory_read / 1e9:.1f} GB/s, float32 matrix product "
        f"{limits.plain_gemm / 1e9:.0f} GFLOP/s by torch and {limits.prepacked_gemm / 1e9:.0f} "
        "prepacked; the floor is what the linears alone take at these."
    )
    return f"### Engine\n\n{markdown(header, rows)}\n\n{notes}"
