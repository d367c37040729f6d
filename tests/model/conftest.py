"""Fixtures of the model's tests: one compute thread, the reference models, the demo model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tasuki.cache_root import cache_root
from tasuki.convert.tiny import make_tiny
from tasuki.native import library
from tests.model.reference import CASES, Reference, make_reference


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    """Compiled and loaded: these tests try both ways of computing."""
    assert library.load(cache_root(os.environ))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests share the machine, and those about threads set their own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=CASES, ids=lambda case: case.name)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    """A random Llama made by transformers, with its directory and its greedy streams."""
    torch.set_num_threads(1)
    return make_reference(request.param, tmp_path_factory.mktemp(request.param.name))


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")
