"""A request's logits are the same bits in any chunks, beside anything, on any threads: with
compiled kernels and in plain torch, in float32 and bfloat16.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tasuki.convert.random_llama import RandomLlama, make_random_llama
from tasuki.kv.cache import DTYPES
from tasuki.model import exactness
from tasuki.model.linear import NATIVE, PLAIN, PREPACKED
from tasuki.model.row_unit import probe
from tasuki.model.transformer import CausalLM
from tests.model.paged import Paged

LENGTH = 230
SHAPES = {
    "gqa": RandomLlama(hidden_size=96, num_heads=6, num_kv_heads=2, head_dim=32),
    "odd": RandomLlama(
        vocab_size=331, hidden_size=72, intermediate_size=149, num_heads=5, num_kv_heads=1,
        head_dim=26, num_layers=2,
    ),
    "mha": RandomLlama(hidden_size=64, num_heads=3, num_kv_heads=3, head_dim=64, num_layers=2),
    "wide": RandomLlama(
        hidden_size=640, intermediate_size=2304, num_heads=9, num_kv_heads=3, num_layers=1,
        head_dim=128,
    ),
    "qwen2": RandomLlama(
        hidden_size=80, num_heads=4, num_kv_heads=2, head_dim=20, num_layers=2, qkv_bias=True
    ),
    "qwen3": RandomLlama(
        hidden_size=96, num_heads=6, num_kv_heads=3, head_dim=48, num_layers=2, qk_norm=True
    ),
}  # fmt: skip


CASES = [
    (shape, dtype, native)
    for native in (True, False)
    for dtype in ("float32", "bfloat16")
    for shape in SHAPES
    if native or dtype == "float32" or shape == "gqa"
]


@pytest.fixture(
    scope="module", params=CASES, ids=lambda c: f"{c[0]}-{c[1]}-{'native' if c[2] else 'torch'}"
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    shape, dtype, native = request.param
    directory = tmp_path_factory.mktemp(shape)
    make_random_llama(directory, SHAPES[shape], seed=4)
    return CausalLM.load(directory, dtype=dtype, native=native)


def is_native(model: CausalLM) -> bool:
    return model.facts()["attention"].startswith("native-")


def prompt(model: CausalLM, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (length,), generator=generator).tolist()


def logits(model: CausalLM, sizes: Iterator[int]) -> torch.Tensor:
    """Of the prompt's last token, computed in chunks of these sizes with nothing beside it."""
    paged = Paged(model, 40)
    run = paged.start(prompt(model, LENGTH, 1), 0)
    paged.prefill(run, sizes)
    return run.logits[0]


@pytest.fixture(scope="module")
def whole(model: CausalLM) -> torch.Tensor:
    torch.set_num_threads(1)
    return logits(model, itertools.repeat(LENGTH))


def test_this_machine_takes_the_exact_kernels(model: CausalLM) -> None:
    dtype = DTYPES[model.dtype]
    own = is_native(model) and torch.ops.tasuki.has_linear(dtype)
    # oneDNN has no bfloat16 for processors without AVX-512
    packs = dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert model.facts()["linears"] == (NATIVE if own else PREPACKED if packs else PLAIN)
    assert not model.facts()["attention"].endswith("inexact")
    if is_native(model):  # with what torch finds here, and said to whom bits are promised
        instructions = torch.ops.tasuki.instructions()
        assert instructions.startswith(torch.backends.cpu.get_cpu_capability().lower())
        assert instructions in model.numerics().rpartition("/")[2]
    assert exactness.holds(model, model.layout(16))


@pytest.mark.parametrize("size", [1, 2, 7, 16, 63, 64, 65, 100, 128])
def test_chunks(model: CausalLM, whole: torch.Tensor, size: int) -> None:
    assert torch.equal(logits(model, itertools.repeat(size)), whole)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("size", [LENGTH, 64, 33])
def test_threads(model: CausalLM, whole: torch.Tensor, threads: int, size: int) -> None:
    torch.set_num_threads(threads)
    same = torch.equal(logits(model, itertools.repeat(size)), whole)
    # Three threads may share out the columns of a single narrow product. A model that is loaded
    # with so many then says that it is inexact.
    inexact = threads > 2 and not is_native(model) and probe(model.config.head_dim) is None
    assert same or inexact


@pytest.mark.parametrize("block_size", [1, 8, 32, 64])
def test_block_sizes(model: CausalLM, whole: torch.Tensor, block_size: int) -> None:
    paged = Paged(model, 10 + LENGTH // block_size, block_size)
    run = paged.start(prompt(model, LENGTH, 1), 0)
    paged.prefill(run, itertools.repeat(96))
    assert torch.equal(run.logits[0], whole)


@pytest.mark.parametrize("others", [1, 3, 17])
def test_decoding_beside_others(model: CausalLM, others: int) -> None:
    """Every step of a stream is the same alone, beside decodes, and beside a stranger's prompt."""
    steps = 8
    alone = Paged(model, 40)
    run = alone.start(prompt(model, 61, 1), steps)  # crosses a tile and a block
    alone.generate([run], steps)

    paged = Paged(model)
    mine = paged.start(prompt(model, 61, 1), steps)
    lengths = itertools.cycle((1, 40, 150, 64, 300))
    beside = [
        paged.start(prompt(model, length, 10 + i), 3 * steps)
        for i, length in zip(range(others), lengths, strict=False)
    ]
    paged.generate(beside, 2)
    late = paged.start(prompt(model, 200, 99), steps)
    paged.generate([*beside, mine, late], steps, budget=80)
    assert mine.output == run.output
    assert torch.equal(torch.stack(mine.logits), torch.stack(run.logits))


def test_recomputing_a_stream_gives_its_decoded_logits(model: CausalLM) -> None:
    """What preemption and fallback rely on: decode, or chunked prefill of the same tokens."""
    paged = Paged(model)
    run = paged.start(prompt(model, 50, 2), 30)
    paged.generate([run], 20)
    again = paged.start(run.tokens[:-1], 0)
    paged.prefill(again, itertools.cycle((13, 1, 30)))
    assert torch.equal(again.logits[-1], run.logits[-1])


def test_order_of_entries_does_not_matter(model: CausalLM) -> None:
    results = []
    for order in (1, -1):
        paged = Paged(model, 60)
        runs = [paged.start(prompt(model, n, n), 1) for n in (1, 30, 5, 70, 1)]
        paged.step([(run, len(run.tokens)) for run in runs[::order]])
        results.append([run.logits[0] for run in runs])
    assert all(map(torch.equal, *results))


def test_a_damaged_stranger_does_no_harm(model: CausalLM, whole: torch.Tensor) -> None:
    """NaN in blocks that others left, or still use, never reaches a request."""
    paged = Paged(model, 40)
    paged.cache.tensor.fill_(torch.nan)
    run = paged.start(prompt(model, LENGTH, 1), 0)
    paged.prefill(run, itertools.cycle((50, 1, 20)))
    assert torch.equal(run.logits[0], whole)


@pytest.mark.parametrize("native", [True, False])
def test_nothing_is_written_but_the_requests_blocks(tiny_directory: Path, native: bool) -> None:
    paged = Paged(CausalLM.load(tiny_directory, native=native), 30)
    before = paged.cache.tensor.clone()
    run = paged.start([65], 20)
    paged.generate([run], 1)  # one row, so padding rows are there
    others = [b for b in range(30) if b not in run.block_ids]
    assert torch.equal(paged.cache.tensor[others], before[others])
    untouched = paged.cache.tensor[run.block_ids[0], :, 1, :, 1:]  # values of later positions
    if native:  # which reads no further than it has written
        assert torch.equal(untouched, before[run.block_ids[0], :, 1, :, 1:])
    else:  # a block starts clean
        assert not untouched.any()


def test_the_probe_sees_a_model_that_is_not_exact(tiny_directory: Path) -> None:
    """Planted: a product that rounds by the number of its rows."""
    model = CausalLM.load(tiny_directory)
    linear = model._head

    def by_rows(x: torch.Tensor) -> torch.Tensor:
        return linear(x) * (1 + 1e-6 * x.shape[0])

    model._head = by_rows  # type: ignore[assignment]
    assert not exactness.holds(model, model.layout(16))
