"""Which connector a device gets, and what its links take of the memory."""

from __future__ import annotations

import pytest
import torch

from tasuki.config import WorkerConfig
from tasuki.engine.connectors import connector_name, link_memory, link_settings, make_connector
from tasuki.engine.memory import choose_num_blocks, require_memory
from tasuki.errors import ConfigError, ModelError
from tasuki.kv.layout import KVLayout
from tasuki.transfer.connectors.gloo import GlooConnector
from tasuki.transfer.connectors.nccl import link_bytes
from tasuki.transfer.connectors.nccl_pair import LIBRARY_BYTES

LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16)
DESCRIPTION = LAYOUT.describe(model_id="m", weights_digest="w", numerics="n")


@pytest.mark.parametrize(
    ("device", "connector", "name"),
    [
        ("cpu", "auto", "gloo"),
        ("cpu", "gloo", "gloo"),
        ("cuda", "auto", "nccl"),
        ("cuda:1", "nccl", "nccl"),
        ("cuda", "gloo", "gloo"),
    ],
)
def test_the_device_chooses_unless_told(device: str, connector: str, name: str) -> None:
    config = WorkerConfig(device=device, connector=connector)
    assert connector_name(config) == name
    settings = link_settings(config, 1, DESCRIPTION)
    assert settings.connector == name
    assert settings.digest == ("none" if name == "nccl" else "xxh3")


def test_links_listen_where_the_rest_does_unless_told() -> None:
    def host(**settings: str) -> str:
        connector = make_connector(WorkerConfig(**settings))  # type: ignore[arg-type] # a test's keys
        assert isinstance(connector, GlooConnector)
        return connector.host

    assert host() == "127.0.0.1"
    assert host(host="198.51.100.7") == "198.51.100.7"
    assert host(host="0.0.0.0", link_host="198.51.100.8") == "198.51.100.8"


def test_nccl_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"--connector nccl .* --device is cpu"):
        WorkerConfig(connector="nccl")


def test_a_build_without_nccl_names_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match="--connector gloo"):
        make_connector(WorkerConfig(device="cuda"))
    assert make_connector(WorkerConfig(device="cuda", connector="gloo")).name == "gloo"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert make_connector(WorkerConfig(device="cuda:1")).name == "nccl"


def test_links_count_in_the_budget_of_a_gpu_alone() -> None:
    assert link_memory(WorkerConfig(), LAYOUT.block_bytes) == 0
    assert link_memory(WorkerConfig(device="cuda", connector="gloo"), LAYOUT.block_bytes) == 0
    config = WorkerConfig(device="cuda", nccl_links=3, window_bytes=8 << 20, segment_bytes=1 << 20)
    assert link_memory(config, LAYOUT.block_bytes) == 3 * link_bytes(8 << 20, 1 << 20)
    assert link_bytes(8 << 20, 1 << 20) == (10 << 20) + LIBRARY_BYTES
    # a block that is larger than a segment is a segment
    assert link_memory(config, 2 << 20) == 3 * link_bytes(8 << 20, 2 << 20)


def test_the_budget_is_what_links_leave() -> None:
    links = 300 << 20
    blocks = choose_num_blocks(LAYOUT, 8192, 0, 1 << 30, links)
    assert blocks * LAYOUT.block_bytes <= (1 << 30) - links < (blocks + 1) * LAYOUT.block_bytes
    with pytest.raises(ConfigError, match=r"737280, beside 314572800 for links"):
        choose_num_blocks(LAYOUT, 8192, 0, 300 << 20, links)
    with pytest.raises(ModelError, match=r"bytes \+ 300 MiB for links = 400 MiB"):
        require_memory(100 << 20, LAYOUT, 0, 399 << 20, links)
