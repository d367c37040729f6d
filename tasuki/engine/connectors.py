"""Which connector a worker uses, by name. The one place that knows them all."""

from __future__ import annotations

from tasuki.config import WorkerConfig
from tasuki.messages import LayoutDescription
from tasuki.transfer.connector import Connector
from tasuki.transfer.gloo import GlooConnector
from tasuki.transfer.link import LinkSettings


def make_connector(config: WorkerConfig) -> Connector:
    """The mechanism named by `--connector`; `WorkerConfig` has checked the name."""
    assert config.connector == "gloo"
    return GlooConnector(config.host)


def link_settings(config: WorkerConfig, epoch: int, layout: LayoutDescription) -> LinkSettings:
    return LinkSettings(
        worker_id=config.worker_id,
        worker_epoch=epoch,
        layout=layout,
        connector=config.connector,
        digest="xxh3" if config.digests else "none",
        segment_bytes=config.segment_bytes,
        window_bytes=config.window_bytes,
        open_timeout=config.link_timeout,
        peer_timeout=config.peer_timeout,
        step_timeout=config.step_timeout,
        progress_timeout=config.handoff_timeout,
    )
