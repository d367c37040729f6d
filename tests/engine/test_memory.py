from __future__ import annotations

import pytest

from tasuki.engine.memory import choose_num_blocks, require_memory
from tasuki.errors import ModelError
from tasuki.kv.layout import KVLayout

DEMO = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16)


def test_the_default_cache_holds_a_longest_request_and_stays_in_bounds() -> None:
    blocks = choose_num_blocks(DEMO, 8192, 0)
    assert blocks * 16 > 8192
    assert blocks * DEMO.block_bytes <= 512 << 20
    tiny = KVLayout(num_layers=2, num_kv_heads=1, head_dim=16, block_size=16)
    assert choose_num_blocks(tiny, 2048, 0) == 8 * 129
    assert choose_num_blocks(tiny, 2048, 7) == 7


def test_what_does_not_fit_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ModelError, match=r"513 MiB of weights \+ 100 KV blocks x 737280 bytes"):
        require_memory(513 << 20, DEMO, 100, available=500 << 20)
