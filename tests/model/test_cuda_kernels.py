"""The GPU's kernels without a GPU: equal to the others within tolerance, and on one device alone.

What they compute is tried on a CPU. That no tensor of another device comes in is tried on torch's
"meta" device, whose tensors have a shape but no memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tasuki.config import WorkerConfig
from tasuki.convert.random_llama import RandomLlama, make_random_llama
from tasuki.engine.engine import Engine
from tasuki.kv.cache import KVCache
from tasuki.kv.layout import KVLayout
from tasuki.model import cuda_kernels, transformer
from tasuki.model.batch import Batch, BatchEntry
from tasuki.model.checkpoint import Checkpoint
from tasuki.model.config import ModelConfig
from tasuki.model.cuda_kernels import CudaKernels, parts, written
from tasuki.model.device import CPU
from tasuki.model.rotary import RotaryTable
from tasuki.model.transformer import CausalLM
from tasuki.model.weights import LayerTensors, ModelWeights
from tests.model.paged import Paged, Run

SHAPES = {
    "gqa": RandomLlama(hidden_size=96, num_heads=6, num_kv_heads=2, head_dim=32),
    "qwen2": RandomLlama(
        hidden_size=80, num_heads=4, num_kv_heads=2, head_dim=20, num_layers=2, qkv_bias=True
    ),
    "qwen3": RandomLlama(
        hidden_size=96, num_heads=3, num_kv_heads=3, head_dim=48, num_layers=2, qk_norm=True
    ),
}  # fmt: skip
TOLERANCE = {"float32": 2e-4, "bfloat16": 0.25}


@pytest.fixture(params=SHAPES)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make_random_llama(tmp_path, SHAPES[request.param], seed=4)
    return tmp_path


def sdpa_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(config: ModelConfig, rotary: RotaryTable) -> CudaKernels:
        return CudaKernels(config, rotary, CPU)

    monkeypatch.setattr(transformer, "TorchKernels", make)


def run_all(model: CausalLM) -> list[Run]:
    """Prompts in chunks, beside each other, and a few tokens after them."""
    paged = Paged(model, 60)
    runs = [paged.start([*range(7, 7 + length)], 4) for length in (1, 40, 63, 64, 100)]
    paged.prefill(runs[2], itertools.cycle((20, 1, 30)))
    for run in runs:
        run.tokens += [5, 9]
    for step in ((3, 30, 2, 50, 100), (0, 12, 0, 16, 2)):
        paged.step([(run, n) for run, n in zip(runs, step, strict=True) if n])
    return runs


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_logits_are_those_of_the_other_kernels(
    directory: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_all(CausalLM.load(directory, dtype=dtype))
    sdpa_on_cpu(monkeypatch)
    # small limits, so that both kinds of entries are cut
    monkeypatch.setattr(cuda_kernels, "GROUP_POSITIONS", 100)
    monkeypatch.setattr(cuda_kernels, "MASK_ELEMENTS", 2000)
    model = CausalLM.load(directory, dtype=dtype)
    assert model.facts()["attention"] == "cpu-sdpa"
    assert model.numerics().endswith("cpu-sdpa")
    for mine, other in zip(run_all(model), expected, strict=True):
        for found, wanted in zip(mine.logits, other.logits, strict=True):
            assert torch.allclose(found, wanted, atol=TOLERANCE[dtype], rtol=0)


def test_a_row_sees_its_own_past_alone() -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=16)
    entries = [
        BatchEntry([1, 2, 3], 15, [9, 4], 1),
        BatchEntry([1], 40, [7, 3, 8], 1),
        BatchEntry([1], 0, [2], 1),
    ]
    batch = Batch.build(entries, layout)
    blocks, offsets = written(batch, layout)
    assert blocks.tolist() == [8, 2, 9, 4, 4]
    assert offsets.tolist() == [8, 0, 15, 0, 1]
    singles, chunk = parts(batch, layout, group=2)
    assert (singles.shape, singles.positions) == ((2, 1), 41)
    assert singles.tables.tolist() == [[7, 3, 8], [2, 2, 2]]
    assert singles.mask.sum(-1).flatten().tolist() == [41, 41, 1, 1]
    assert (chunk.shape, chunk.positions) == ((1, 3), 18)
    assert chunk.rows.tolist() == [2, 3, 4]
    assert chunk.mask.sum(-1).flatten().tolist() == [16, 16, 17, 17, 18, 18]


def test_an_engine_computes_with_them(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdpa_on_cpu(monkeypatch)
    engine = Engine.load(WorkerConfig(model=str(tiny_directory), native=False, kv_blocks=40))
    engine.warm_up()
    assert not engine.cache.tensor.any()


class Loaded:
    """Weights read before, handed out on whatever device the caller wants."""

    def __init__(self, config: ModelConfig, directory: Path) -> None:
        with Checkpoint(directory) as checkpoint:
            weights = ModelWeights(config, checkpoint)
            self._embedding, self._norm = weights.embedding(), weights.final_norm()
            self._head, self._layers = weights.head(), [*weights.layers()]

    def embedding(self) -> torch.Tensor:
        return self._embedding

    def final_norm(self) -> torch.Tensor:
        return self._norm

    def head(self) -> torch.Tensor | None:
        return self._head

    def layers(self) -> Iterator[LayerTensors]:
        return iter(self._layers)


MOVES = ("aten::_to_copy", "aten::copy_", "aten::to")


class OneDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses every operator whose tensors lie on different devices, but for those that move."""

    moves = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        devices = {tensor.device.type for tensor in found if tensor.ndim}
        if len(devices) > 1 or func.name().startswith(MOVES):
            assert func.name().startswith(MOVES), f"{func.name()} got tensors of {devices}"
            target = (kwargs or {}).get("device")
            if devices == {"meta"} and target is not None and target.type == "cpu":
                self.moves += 1
                return torch.zeros(found[0].shape, dtype=found[0].dtype)  # it has no values
        return func(*args, **(kwargs or {}))


class NoEvent:
    """Stands in for an event and a stream."""

    def record(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_step_touches_its_own_device_alone(
    directory: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, device = ModelConfig.from_directory(directory), torch.device("meta")
    weights: Any = Loaded(config, directory)
    layout = config.kv_layout(16, dtype)
    entries = [BatchEntry([1, 2, 3], 15, [9, 4], 1), BatchEntry([1], 40, [7, 3, 8], 1)]
    batch = Batch.build(entries, layout)
    monkeypatch.setattr(torch.cuda, "Event", NoEvent)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: NoEvent())
    with OneDevice() as mode:  # type: ignore[no-untyped-call]
        model = CausalLM(config, weights, dtype=dtype, native=False, device=device)
        logits = model.forward(batch, KVCache(layout, 12, "meta"))
    assert logits.shape == (2, config.vocab_size)
    assert logits.device.type == "cpu"
    assert mode.moves == 1, "a step brings its logits to the host, and nothing else"
