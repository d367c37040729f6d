"""A cluster as data, and the settings each process gets from it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cli.cluster.cluster_spec import ClusterSpec, module_program
from tasuki.config import WorkerConfig, build, to_args
from tasuki.messages import Role


def test_workers_in_the_order_in_which_cores_are_dealt() -> None:
    spec = ClusterSpec(model=Path("m"), prefill=1, decode=2, cpus=(4, 5), threads=1)
    assert spec.workers() == [
        ("prefill-0", Role.PREFILL),
        ("decode-0", Role.DECODE),
        ("decode-1", Role.DECODE),
    ]
    assert [spec.worker_config(name).cpus for name, _ in spec.workers()] == ["4", "5", "4"]


def test_a_worker_gets_its_name_and_free_ports_whatever_the_template_says() -> None:
    template = WorkerConfig(port=1, metrics_port=2, host="0.0.0.0", worker_id="x", block_size=32)
    config = ClusterSpec(model=Path("m"), worker=template).worker_config("decode-0")
    assert (config.worker_id, config.host, config.port, config.metrics_port) == (
        "decode-0", "127.0.0.1", 0, 0,
    )  # fmt: skip
    assert config.block_size == 32


def test_overrides_reach_one_worker_only() -> None:
    spec = ClusterSpec(
        model=Path("m"), decode=2, overrides={"decode-1": {"max_waiting": 3, "kv_blocks": 9}}
    )
    assert spec.worker_config("decode-0").max_waiting == WorkerConfig().max_waiting
    assert spec.worker_config("decode-1").max_waiting == 3


def test_kernels_are_wanted_by_any_worker_or_none() -> None:
    assert ClusterSpec(model=Path("m")).wants_kernels
    off, on = {"native": False}, {"native": True}
    assert not ClusterSpec(model=Path("m"), worker=WorkerConfig(native=False)).wants_kernels
    spec = ClusterSpec(
        model=Path("m"),
        worker=WorkerConfig(native=False),
        overrides={"prefill-0": off, "decode-0": on | {"kv_blocks": 9}},
    )
    assert spec.wants_kernels
    without = spec.without_kernels()
    assert not without.wants_kernels
    assert without.worker_config("decode-0").kv_blocks == 9


def test_draining_ends_before_the_stop_deadline() -> None:
    overrides = {"decode-0": {"drain_timeout": 60.0}}
    spec = ClusterSpec(model=Path("m"), stop_timeout=4.0, overrides=overrides)
    assert spec.worker_config("prefill-0").drain_timeout == 2.0
    assert spec.worker_config("decode-0").drain_timeout == 2.0
    assert spec.router_config([], ["127.0.0.1:9"]).drain_timeout == 2.0


def test_flags_carry_every_setting_to_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASUKI_PORT", "50051")
    monkeypatch.setenv("TASUKI_BLOCK_SIZE", "8")
    monkeypatch.setenv("TASUKI_CACHE", "/somewhere")
    spec = ClusterSpec(model=Path("m"), threads=2)
    env = spec.environment()
    flags = dict(
        arg.removeprefix("--").split("=") for arg in to_args(spec.worker_config("decode-0"))
    )
    given = {name.replace("-", "_"): value for name, value in flags.items()}
    # What this process was told in its environment is not told to the children a second time.
    assert build(WorkerConfig, given, env) == spec.worker_config("decode-0")
    assert env["TASUKI_CACHE"] == "/somewhere"
    assert env["OMP_NUM_THREADS"] == "2"


def test_children_find_this_checkout_and_ignore_the_working_directory() -> None:
    root = ClusterSpec(model=Path("m")).environment()["PYTHONPATH"].split(os.pathsep)[0]
    assert (Path(root) / "tasuki" / "config.py").is_file()
    assert "-P" in module_program("decode")
