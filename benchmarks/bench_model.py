"""Which model the engine benchmark runs: the demo, or a random one where it cannot be had."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tasuki.cache_root import cache_root
from tasuki.convert.demo import ensure_demo
from tasuki.convert.random_llama import RandomLlama, make_random_llama
from tasuki.errors import ModelError

RANDOM = RandomLlama(
    vocab_size=8192, hidden_size=384, intermediate_size=1536, num_layers=12, num_heads=6,
    num_kv_heads=2, head_dim=64, tie_word_embeddings=True,
)  # fmt: skip


@dataclass(frozen=True)
class BenchModel:
    directory: Path
    name: str


@contextmanager
def bench_model() -> Iterator[BenchModel]:
    """The demo model from the cache, fetched if need be; else a random one for this block only."""
    try:
        demo = ensure_demo(cache_root(os.environ))
    except ModelError as error:
        print(f"{error.message}\nMeasuring a random model of 29M weights instead.", file=sys.stderr)
    else:
        yield BenchModel(demo, "demo model")
        return
    with tempfile.TemporaryDirectory(prefix="tasuki-bench-") as scratch:
        make_random_llama(Path(scratch), RANDOM)
        yield BenchModel(Path(scratch), "random model of 29M weights, NOT the demo model")
