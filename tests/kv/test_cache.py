"""Copies between blocks of a cache and other memory."""

from __future__ import annotations

import torch

from tasuki.kv.cache import KVCache
from tasuki.kv.layout import KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_size=16)


def test_blocks_are_read_and_written_in_the_order_asked_for() -> None:
    source, target = KVCache(LAYOUT, 8), KVCache(LAYOUT, 8)
    source.tensor.copy_(torch.rand(source.tensor.shape))
    assert source.device == torch.device("cpu")
    between = torch.empty(3 * LAYOUT.block_bytes, dtype=torch.uint8)
    source.read_blocks([5, 0, 6], between)
    target.write_blocks([1, 7, 2], between)
    for sent, received in ((5, 1), (0, 7), (6, 2)):
        assert torch.equal(source.tensor[sent], target.tensor[received])
    assert not target.tensor[[0, 3, 4, 5, 6]].any()


def test_a_cleared_cache_is_zero() -> None:
    cache = KVCache(LAYOUT, 2)
    cache.tensor.fill_(1.0)
    cache.clear()
    assert not cache.tensor.any()
