"""Which connector a worker uses, by name and device. The one place that knows them all."""

from __future__ import annotations

import torch

from tasuki.config import WorkerConfig
from tasuki.errors import ConfigError
from tasuki.messages import LayoutDescription
from tasuki.transfer.connector import Connector
from tasuki.transfer.connectors.faulty import Faults, FaultyConnector
from tasuki.transfer.connectors.gloo import GlooConnector
from tasuki.transfer.connectors.nccl import NcclConnector, link_bytes
from tasuki.transfer.link import LinkSettings


def connector_name(config: WorkerConfig) -> str:
    """What `--connector auto` means on this worker's device."""
    if config.connector != "auto":
        return config.connector
    return "gloo" if config.device == "cpu" else "nccl"


def make_connector(config: WorkerConfig) -> Connector:
    """The mechanism named by `--connector`; `WorkerConfig` has checked the name.

    Raises ConfigError when this build of torch does not have it.
    """
    connector = _plain_connector(config)
    return FaultyConnector(connector, Faults()) if config.fault_injection else connector


def _plain_connector(config: WorkerConfig) -> Connector:
    if connector_name(config) == "gloo":
        return GlooConnector(config.link_host or config.host)
    if not torch.distributed.is_nccl_available():
        raise ConfigError(
            "this build of torch has no NCCL; start all workers with --connector gloo, which moves "
            "the KV of a GPU through pinned host memory"
        )
    device = torch.device("cuda", torch.device(config.device).index or 0)
    return NcclConnector(device, config.nccl_links)


def link_memory(config: WorkerConfig, block_bytes: int) -> int:
    """Bytes of the device that all links together may take beside the KV cache.

    On a CPU none are counted: pages of an idle link's buffers are never touched.
    """
    if connector_name(config) != "nccl":
        return 0
    segment = max(config.segment_bytes, block_bytes)
    return config.nccl_links * link_bytes(config.window_bytes, segment)


def link_settings(config: WorkerConfig, epoch: int, layout: LayoutDescription) -> LinkSettings:
    """Digests read every byte on a CPU, so segments that stay on GPUs go without."""
    name = connector_name(config)
    return LinkSettings(
        worker_id=config.worker_id,
        worker_epoch=epoch,
        layout=layout,
        connector=name,
        digest="xxh3" if config.digests and name != "nccl" else "none",
        segment_bytes=config.segment_bytes,
        window_bytes=config.window_bytes,
        open_timeout=config.link_timeout,
        peer_timeout=config.peer_timeout,
        step_timeout=config.step_timeout,
        # The receiver decides first: it knows what it lacks, and what became of it.
        progress_timeout=2 * config.handoff_timeout,
    )
