"""Whether a model and its KV cache fit into this device's memory, with the arithmetic to show."""

from __future__ import annotations

from pathlib import Path

from tasuki.errors import ModelError
from tasuki.kv.layout import KVLayout

DEFAULT_KV_BYTES = 512 << 20
DEFAULT_KV_REQUESTS = 8
MIB = 1 << 20


def available_memory() -> int:
    """Bytes that can be allocated without swapping, from /proc/meminfo."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ModelError("/proc/meminfo does not name MemAvailable; this needs Linux 3.14 or newer")


def choose_num_blocks(layout: KVLayout, max_model_len: int, wanted: int) -> int:
    """How many KV blocks to have: `wanted`, or (0) room for a few of the longest requests."""
    if wanted:
        return wanted
    longest = layout.blocks_for(max_model_len + 1)
    affordable = max(1, DEFAULT_KV_BYTES // layout.block_bytes)
    return max(longest, min(DEFAULT_KV_REQUESTS * longest, affordable))


def require_memory(weight_bytes: int, layout: KVLayout, num_blocks: int, available: int) -> None:
    """Raise ModelError with the sum when weights and cache together do not fit."""
    cache_bytes = num_blocks * layout.block_bytes
    total = weight_bytes + cache_bytes
    if total > available:
        raise ModelError(
            f"the model does not fit: {weight_bytes // MIB} MiB of weights + {num_blocks} KV "
            f"blocks x {layout.block_bytes} bytes = {total // MIB} MiB, but only "
            f"{available // MIB} MiB are available; take a smaller model or fewer --kv-blocks"
        )
