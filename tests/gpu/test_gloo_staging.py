"""Two processes with caches on one GPU hand KV over by gloo, through pinned memory both ways."""

from __future__ import annotations

import pytest
import torch

from tests.transfer.rig import LAYOUT
from tests.transfer.sender_process import source_cache
from tests.transfer.test_gloo_processes import BLOCKS, split_processes

pytestmark = [pytest.mark.gpu, pytest.mark.dist]


def test_every_byte_arrives_where_it_belongs(gpu: torch.device) -> None:
    torch.zeros(1).pin_memory()  # the host allocator's own descriptors are no leftover
    with split_processes(die_after=0, device=str(gpu)) as decode:
        decode.side.loop.run_until(lambda: decode.handoff.is_committed or decode.ended, 60)
        assert decode.handoff.is_committed
        assert decode.cache.device == gpu
        expected = source_cache(BLOCKS)
        assert torch.equal(decode.cache.tensor.cpu().flip(0), expected.tensor)
        assert decode.handoff.tokens == BLOCKS * LAYOUT.block_size
