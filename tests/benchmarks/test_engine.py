"""The engine benchmark measures and reports every cell, on a model that takes no time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import engine
from benchmarks.bench_model import BenchModel
from tasuki.convert.tiny import make_tiny


def test_every_cell_is_measured_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny(tmp_path / "tiny")

    @contextmanager
    def tiny() -> Iterator[BenchModel]:
        yield BenchModel(model, "tiny")

    monkeypatch.setattr(engine, "bench_model", tiny)
    monkeypatch.setattr(engine, "PREFILLS", (128,))
    monkeypatch.setattr(engine, "BATCHES", (1, 8))
    monkeypatch.setattr(engine, "CURVE", (1, 4))
    monkeypatch.setattr(
        engine, "ALL", (engine.Setting("float32", 1), engine.Setting("bfloat16", 1))
    )
    result = engine.measure(1)
    assert [one.setting.dtype for one in result.settings] == ["float32", "bfloat16"]
    for one in result.settings:
        assert [cell.name for cell in one.cells] == ["P128", "D1", "D8"]
        assert [point.batch for point in one.curve] == [1, 4]
        for cell in one.cells:
            assert cell.ours.median > cell.floor > 0
            assert 0 < cell.shares.linears < 1
    assert result.settings[0].cells[0].of_kernel is not None
    assert result.settings[1].cells[0].of_kernel is None
    text = engine.report(result)
    for words in ("float32, 1 thread", "bfloat16, 1 thread", "P128", "TPOT, ms", "GB/s"):
        assert words in text
