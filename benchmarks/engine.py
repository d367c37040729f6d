"""The engine against transformers on one model, by dtype and threads, in one run.

Both are called in process, without a server, on cores of their own. Prompts are random tokens, new
in every round and the same for both; a decode goes on from round to round at the same context on
both sides. Beside each figure stands the least time that this machine's limits allow, and what
share of the step the matrix products and attention take.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.bench_model import BenchModel, bench_model
from benchmarks.contender import Contender, Prompt
from benchmarks.floor import (
    SECOND_KERNEL,
    TWICE_TRANSFORMERS,
    decode_floor,
    prefill_floor,
    share_of_reference,
)
from benchmarks.machine import Limits
from benchmarks.pinning import own_cores, pinned
from benchmarks.rounds import Spread, interleave, ratios
from benchmarks.step_shares import Shares, shares_of
from benchmarks.table import markdown, with_range
from benchmarks.tasuki_engine import TasukiEngine
from benchmarks.transformers_model import TransformersModel
from tasuki.kv.cache import DTYPES
from tasuki.model.config import ModelConfig

CONTEXT = 224  # the mean over a decode's rounds
PREFILLS = (128, 512, 2048)
BATCHES = (1, 8, 32)
CURVE = (1, 2, 4, 8, 16, 32, 64)
CHUNK = 2048  # a whole prompt in one step, as the other side computes it
STEPS = 8  # decode steps per round
ROUNDS = 3
WARM_UP = 1


@dataclass(frozen=True)
class Setting:
    dtype: str
    threads: int


QUICK = (Setting("float32", 1),)
ALL = tuple(Setting(dtype, threads) for dtype in DTYPES for threads in (1, 2))


@dataclass(frozen=True)
class Cell:
    name: str
    peer: str  # the faster of theirs
    ours: Spread  # seconds
    theirs: Spread
    ratio: Spread  # of the rounds' own ratios
    floor: float  # seconds; see benchmarks.floor
    of_twice: float | None  # how near the floor, against twice transformers on the design's machine
    of_kernel: float | None  # likewise, against the design's second kernel
    shares: Shares


@dataclass(frozen=True)
class Point:
    batch: int
    tpot: float  # seconds per step
    tokens_per_second: float


@dataclass(frozen=True)
class SettingResult:
    setting: Setting
    limits: Limits
    cells: tuple[Cell, ...]
    curve: tuple[Point, ...]


@dataclass(frozen=True)
class EngineResult:
    model: str
    rounds: int
    settings: tuple[SettingResult, ...]
    equal_tokens: int  # greedy tokens of the decodes that both sides agree on
    all_tokens: int


def measure(rounds: int = ROUNDS, *, quick: bool = False) -> EngineResult:
    """Raises RuntimeError when the two sides do not compute the same thing."""
    results: list[SettingResult] = []
    equal = total = 0
    with bench_model() as model:
        for setting in QUICK if quick else ALL:
            cores = own_cores()[::-1][: setting.threads]
            with pinned(*cores):
                torch.set_num_threads(setting.threads)
                comparison = Comparison(model, setting, rounds)
                results.append(comparison.run())
                equal, total = equal + comparison.equal, total + comparison.all
                del comparison
                gc.collect()
    return EngineResult(model.name, rounds, tuple(results), equal, total)


class Comparison:
    """One setting."""

    def __init__(self, model: BenchModel, setting: Setting, rounds: int) -> None:
        self._setting = setting
        self._rounds = rounds
        self._config = ModelConfig.from_directory(model.directory)
        self._ours = TasukiEngine.load(
            model.directory, CHUNK, dtype=setting.dtype, threads=setting.threads
        )
        self._theirs = {
            name: TransformersModel.quietly(model.directory, name, DTYPES[setting.dtype])
            for name in ("sdpa", "eager")
        }
        self._limits = Limits.measure(DTYPES[setting.dtype])
        self.equal = self.all = 0

    def run(self) -> SettingResult:
        cells = [self._prefill(length) for length in PREFILLS]
        cells += [self._decode(batch) for batch in BATCHES]
        curve = [self._point(batch) for batch in CURVE]
        return SettingResult(self._setting, self._limits, tuple(cells), tuple(curve))

    def _prompts(self, count: int, length: int, seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        shape = (count, length)
        prompts: list[list[int]] = torch.randint(
            100, self._config.vocab_size, shape, generator=generator
        ).tolist()
        return prompts

    def _prefill(self, length: int) -> Cell:
        contenders: dict[str, Contender] = {"ours": self._ours, **self._theirs}
        prompts = self._prompts(self._rounds + WARM_UP + 1, length, seed=1)
        firsts: dict[str, list[int]] = {name: [] for name in contenders}
        runs = {name: prefill_run(one, prompts, firsts[name]) for name, one in contenders.items()}
        times = interleave(runs, self._rounds, WARM_UP)
        exact = self._setting.dtype == "float32"  # else a rounding may decide a near tie
        if exact and len({tuple(tokens) for tokens in firsts.values()}) != 1:
            raise RuntimeError(f"the first tokens differ; no speed can be compared: {firsts}")
        floor = prefill_floor(self._config, length, self._limits.gemm)
        return self._cell(f"P{length}", times, floor, runs["ours"])

    def _decode(self, batch: int) -> Cell:
        contenders: dict[str, Contender] = {"ours": self._ours, **self._theirs}
        steps = STEPS * (self._rounds + WARM_UP + 1)
        prompts = self._prompts(batch, max(16, CONTEXT - steps // 2), seed=2)
        for one in contenders.values():
            one.start(prompts, steps)
        runs = {name: partial(one.decode, STEPS) for name, one in contenders.items()}
        times = interleave(runs, self._rounds, WARM_UP)
        floor = decode_floor(self._config, batch, CONTEXT, self._limits, self._setting.dtype)
        cell = self._cell(f"D{batch}", times, floor, runs["ours"])
        said = {name: one.stop() for name, one in contenders.items()}
        self._compare_tokens(said["ours"], said[cell.peer])
        return cell

    def _cell(
        self,
        name: str,
        times: Mapping[str, Sequence[float]],
        floor: float,
        once: Callable[[], float],
    ) -> Cell:
        peer = min(self._theirs, key=lambda peer: Spread.of(times[peer]).median)
        ours = Spread.of(times["ours"])

        def of(reference: Mapping[str, float]) -> float | None:
            if self._setting != Setting("float32", 1):
                return None
            return share_of_reference(self._config, name, ours.median, floor, reference)

        return Cell(
            name,
            peer,
            ours,
            Spread.of(times[peer]),
            Spread.of(ratios(times[peer], times["ours"])),
            floor,
            of(TWICE_TRANSFORMERS),
            of(SECOND_KERNEL),
            shares_of(once),
        )

    def _point(self, batch: int) -> Point:
        steps = 2 * STEPS
        self._ours.start(self._prompts(batch, CONTEXT - steps // 2, seed=3), steps)
        self._ours.decode(STEPS // 2)
        seconds = self._ours.decode(STEPS)
        self._ours.stop()
        return Point(batch, seconds, batch / seconds)

    def _compare_tokens(self, ours: list[list[int]], theirs: list[list[int]]) -> None:
        """Not required to be equal: at a near tie a rounding decides, and the streams part."""
        for mine, other in zip(ours, theirs, strict=True):
            length = min(len(mine), len(other))
            self.all += length
            self.equal += sum(a == b for a, b in zip(mine[:length], other[:length], strict=True))


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
    parts = [f"### Engine: {result.model}"]
    for one in result.settings:
        parts += [setting_table(one), limits_line(one.limits), curve_table(one.curve)]
    parts.append(
        f"{result.rounds} rounds; P is a prompt of that length in one step, D a decode step of "
        f"that batch at a context of about {CONTEXT}. Greedy tokens that both sides agree on: "
        f"{result.equal_tokens} of {result.all_tokens}. The floor is what the matrix products and "
        "reading weights and KV take at this machine's limits. Scaled: how near the floor a cell "
        "comes, as a multiple of how near its own floor the design's machine came."
    )
    return "\n\n".join(parts)


def setting_table(one: SettingResult) -> str:
    header = [
        f"{one.setting.dtype}, {one.setting.threads} thread{'s' * (one.setting.threads > 1)}",
        "ours, ms",
        "transformers, ms (its faster attention)",
        "ratio, median (range)",
        "floor, ms",
        "matrix products / attention / rest",
    ]
    rows = [
        [
            cell.name,
            f"{1000 * cell.ours.median:.1f}",
            f"{1000 * cell.theirs.median:.1f} ({cell.peer})",
            with_range(cell.ratio),
            f"{1000 * cell.floor:.1f}",
            str(cell.shares),
        ]
        for cell in one.cells
    ]
    if all(cell.of_kernel is not None for cell in one.cells):
        header += ["of twice transformers, scaled", "of the second kernel, scaled"]
        rows = [
            [*row, f"{cell.of_twice:.2f}", f"{cell.of_kernel:.2f}"]
            for row, cell in zip(rows, one.cells, strict=True)
        ]
    return markdown(header, rows)


def limits_line(limits: Limits) -> str:
    return (
        f"Limits: memory read {limits.memory_read / 1e9:.1f} GB/s, matrix product "
        f"{limits.plain_gemm / 1e9:.0f} GFLOP/s by torch and {limits.prepacked_gemm / 1e9:.0f} "
        "prepacked."
    )


def curve_table(curve: Sequence[Point]) -> str:
    return markdown(
        ["batch", *(str(point.batch) for point in curve)],
        [
            ["TPOT, ms", *(f"{1000 * point.tpot:.1f}" for point in curve)],
            ["tokens/s", *(f"{point.tokens_per_second:.0f}" for point in curve)],
        ],
    )
