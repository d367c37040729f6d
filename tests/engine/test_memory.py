from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tasuki.engine.memory import choose_num_blocks, require_memory
from tasuki.errors import ConfigError, ModelError
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


def test_a_given_memory_is_filled_and_not_exceeded() -> None:
    blocks = choose_num_blocks(DEMO, 8192, 0, 1 << 30)
    assert blocks * DEMO.block_bytes <= 1 << 30 < (blocks + 1) * DEMO.block_bytes
    with pytest.raises(ConfigError, match="737280"):
        choose_num_blocks(DEMO, 8192, 0, 700_000)


# Loads the demo model, computes with the whole cache, and says what is resident.
WORKER = """
import sys
from tasuki.config import WorkerConfig
from tasuki.engine.engine import Engine
from tasuki.engine.memory import resident_memory
from tasuki.engine.start import memory
engine = Engine.load(WorkerConfig(model=sys.argv[1]))
engine.warm_up()
engine.cache.tensor.fill_(1.0)
print(resident_memory())
print(memory(engine).split()[0])
status = open("/proc/self/status").read().splitlines()
sizes = {line.partition(":")[0]: line.split()[1] for line in status if "Rss" in line}
print(int(sizes["RssAnon"]) << 10, int(sizes["RssFile"]) << 10)
"""


@pytest.mark.demo
def test_a_demo_worker_takes_what_it_says_and_three_stay_under_4_gib(demo_directory: Path) -> None:
    """One copy of the weights, the cache, and what was told beside it; servers included."""
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(demo_directory)],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    resident, told, own, libraries = (int(word) for word in done.stdout.split())
    server = 90 << 20  # a worker's torch-free process
    # pages of libraries are in memory once, however many processes map them
    assert 3 * (own + server) + libraries < 4 << 30
    assert resident <= (told << 20) * 1.05
