"""Which devices a worker takes, and what it says of one that is not there."""

from __future__ import annotations

import pytest
import torch

from tasuki.config import WorkerConfig
from tasuki.errors import ConfigError
from tasuki.model.device import CPU, machine, open_device


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:0", "cuda:13"])
def test_a_device_has_a_name(name: str) -> None:
    assert WorkerConfig(device=name).device == name


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:-1", "cpu:0", "CUDA", "cuda:1x"])
def test_anything_else_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--device is .*expected cpu, cuda or cuda:N"):
        WorkerConfig(device=name)


def test_the_cpu_is_always_there() -> None:
    assert open_device("cpu") == CPU
    assert machine(CPU) == f"cpu/{torch.backends.cpu.get_cpu_capability()}"


def test_a_build_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match="this build of torch has no CUDA; install one"):
        open_device("cuda")


def test_a_machine_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match="no usable GPU; look at nvidia-smi"):
        open_device("cuda:1")


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with pytest.raises(ConfigError, match=r"sees 2 GPU\(s\), cuda:0 to cuda:1"):
        open_device("cuda:2")
    assert open_device("cuda") == torch.device("cuda", 0)
    assert open_device("cuda:1") == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 0), torch.device("cuda", 1)]
