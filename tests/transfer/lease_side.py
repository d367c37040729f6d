"""What a decode and a prefill worker have in common when all that counts is who owns which block
when: real block ownership, and a number in every block that says what it should hold.

Whatever is freed is overwritten with POISON; a write that comes later, or a read of what was
freed, shows as a wrong number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from tasuki.clock import FakeClock
from tasuki.kv.block_pool import BlockPool, BlockState
from tasuki.kv.cache import KVCache
from tasuki.kv.layout import KVLayout
from tasuki.kv.manager import KVCacheManager
from tasuki.messages import LinkMessage, SamplingParams
from tasuki.request import Request
from tasuki.transfer.link import LinkSettings
from tests.transfer.lease_streams import Stream, Wires

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=2)
DESCRIPTION = LAYOUT.describe(model_id="m", weights_digest="w", numerics="cpu")
NUM_BLOCKS = 12
TIMEOUT, OPEN_TIMEOUT = 5.0, 7.0
POISON = -1.0


def value(prompt: int, logical: int) -> float:
    """What block `logical` of this prompt holds."""
    return float(100 * prompt + logical + 1)


def settings(worker_id: str, epoch: int) -> LinkSettings:
    return LinkSettings(
        worker_id=worker_id,
        worker_epoch=epoch,
        layout=DESCRIPTION,
        connector="loopback",
        digest="xxh3",
        segment_bytes=2 * LAYOUT.block_bytes,
        window_bytes=3 * LAYOUT.block_bytes,
        open_timeout=OPEN_TIMEOUT,
        progress_timeout=TIMEOUT,
    )


class PoisoningPool(BlockPool):
    def __init__(self, cache: KVCache) -> None:
        super().__init__(cache.num_blocks)
        self._rows = cache.tensor.view(cache.num_blocks, -1)
        self._rows.fill_(POISON)

    def allocate(self, count: int, state: BlockState = BlockState.IN_USE) -> list[int] | None:
        self.check_poison()
        block_ids = super().allocate(count, state)
        for block_id in block_ids or ():
            self._rows[block_id] = POISON  # it may have been a cached one
        return block_ids

    def free(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            super().free([block_id])
            if self.state(block_id) is BlockState.FREE:
                self._rows[block_id] = POISON

    def forget_names(self) -> int:
        raise NotImplementedError

    def check_poison(self) -> None:
        """Nobody wrote into a free block."""
        for block_id, row in enumerate(self._rows.tolist()):
            if self.state(block_id) is BlockState.FREE:
                assert set(row) == {POISON}, f"free block {block_id} was written into: {row}"


@dataclass(frozen=True)
class Ask:
    """A Prefill call's request."""

    handoff_id: str
    link_id: str
    prefill_epoch: int
    prompt: int
    length: int
    first_block: int
    single: bool  # max_tokens = 1: nobody needs the KV


@dataclass(frozen=True)
class Reply:
    """One event of a Prefill call, or its end."""

    handoff_id: str
    kind: str  # accepted, progress, first_token, done, failed
    epoch: int = 0  # of the prefill worker that says it


class Network(Protocol):
    """What a side asks of the world around it."""

    clock: FakeClock
    wires: Wires
    met: Counter[str]

    def to_peer(self, link_id: str, rank: int, message: LinkMessage) -> None: ...

    def close_control(self, link_id: str) -> None: ...

    def call(self, ask: Ask) -> None: ...

    def cancel_call(self, handoff_id: str) -> None: ...

    def reply(self, reply: Reply) -> None: ...


class Side:
    """Memory, and a LinkHost of one incarnation."""

    rank = 0

    def __init__(self, world: Network, epoch: int, *, prefix_caching: bool) -> None:
        self.world, self.epoch = world, epoch
        self.cache = KVCache(LAYOUT, NUM_BLOCKS)
        self.blocks = KVCacheManager(LAYOUT, NUM_BLOCKS, prefix_caching=prefix_caching)
        self.blocks.pool = self.pool = PoisoningPool(self.cache)
        self.soon: Stream[Callable[[], None]] = Stream(lambda fn: fn(), lambda: None)
        self.stale = 0
        self._keys = 0

    def send(self, link_id: str, message: LinkMessage) -> None:
        self.world.to_peer(link_id, self.rank, message)

    def call_soon(self, fn: Callable[[], None]) -> None:
        self.soon.put(fn)

    def request(self, prompt: int, length: int) -> Request:
        self._keys += 1
        return Request(
            key=self._keys,
            request_id=f"r{self._keys}",
            prompt_token_ids=[1000 * prompt + place for place in range(length)],
            sampling=SamplingParams(max_tokens=9),
            eos_token_ids=frozenset(),
            arrived=0.0,
        )

    def content(self, request: Request) -> list[float]:
        """One number for each block that the request holds; a torn block has none."""
        rows = self.cache.tensor.view(NUM_BLOCKS, -1)[list(self.blocks.table(request.key))]
        return [row[0] if len(set(row)) == 1 else float("nan") for row in rows.tolist()]

    def write(self, request: Request, prompt: int, first: int, end: int) -> None:
        for logical, block_id in enumerate(self.blocks.table(request.key)[first:end], first):
            self.cache.tensor[block_id] = value(prompt, logical)

    def check_memory(self, live_keys: Iterable[int]) -> None:
        self.blocks.check_integrity()
        assert not self.blocks.leaked(live_keys)
        self.pool.check_poison()
