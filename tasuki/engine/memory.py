"""Whether a model and its KV cache fit into this device's memory, with the arithmetic to show.

Knows the host's memory and a GPU's; what else needs memory is told to it in bytes.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from tasuki.errors import ConfigError, ModelError
from tasuki.kv.layout import KVLayout
from tasuki.model.device import CPU

DEFAULT_KV_BYTES = 384 << 20  # three workers of the demo model then stay under 4 GiB
DEFAULT_KV_REQUESTS = 8
MIB = 1 << 20


def available_memory(device: torch.device = CPU) -> int:
    """Bytes that can be allocated: of a GPU's memory, or without swapping, from /proc/meminfo."""
    if device.type != "cpu":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ModelError("/proc/meminfo does not name MemAvailable; this needs Linux 3.14 or newer")


def resident_memory(device: torch.device = CPU) -> int:
    """Bytes of this process that are in this device's memory now: on a GPU, what torch took."""
    if device.type != "cpu":
        return torch.cuda.memory_reserved(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def give_back_memory() -> None:
    """Return to the system what loading needed for a moment, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def choose_num_blocks(
    layout: KVLayout, max_model_len: int, wanted: int, nbytes: int = 0, link_bytes: int = 0
) -> int:
    """How many KV blocks to have: `wanted`, or those that fit into `nbytes` beside the links'
    buffers, or (both 0) room for a few of the longest requests. Raises ConfigError when not even
    one block fits.
    """
    if wanted:
        return wanted
    if nbytes:
        room = nbytes - link_bytes
        if room < layout.block_bytes:
            links = f", beside {link_bytes} for links" if link_bytes else ""
            raise ConfigError(
                f"--kv-cache-memory is {nbytes} bytes, and one KV block of this model takes "
                f"{layout.block_bytes}{links}; ask for more"
            )
        return room // layout.block_bytes
    longest = layout.blocks_for(max_model_len + 1)
    affordable = max(1, DEFAULT_KV_BYTES // layout.block_bytes)
    return max(longest, min(DEFAULT_KV_REQUESTS * longest, affordable))


def require_memory(
    weight_bytes: int, layout: KVLayout, num_blocks: int, available: int, link_bytes: int = 0
) -> None:
    """Raise ModelError with the sum when weights, cache and links together do not fit."""
    cache_bytes = num_blocks * layout.block_bytes
    total = weight_bytes + cache_bytes + link_bytes
    links = f" + {link_bytes // MIB} MiB for links" if link_bytes else ""
    if total > available:
        raise ModelError(
            f"the model does not fit: {weight_bytes // MIB} MiB of weights + {num_blocks} KV "
            f"blocks x {layout.block_bytes} bytes{links} = {total // MIB} MiB, but only "
            f"{available // MIB} MiB are available; take a smaller model or fewer --kv-blocks"
        )
