"""What the prefix cache finds of a real trace's prompts, against an infinite one and the optimum.

Replays the first 2,000 rows of Mooncake's conversation trace through the product's KVCacheManager,
one request after the other, without computing anything: counts, not times, so that every run gives
the same. One block stands for the 512 tokens behind one id of the trace; the last, partial id of a
prompt is never shared.

The optimum evicts the block that is needed again last (Belady, "A study of replacement algorithms
for a virtual-storage computer", IBM Systems Journal 5(2), 1966).
"""

from __future__ import annotations

import csv
import heapq
import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.table import markdown
from tasuki.kv.layout import KVLayout
from tasuki.kv.manager import KVCacheManager
from tasuki.messages import SamplingParams
from tasuki.request import Request

TRACE = Path(__file__).parents[1] / "experiments" / "data" / "mooncake_conversation_2000.csv"
TOKENS_PER_ID = 512
SHARES = (1, 4, 16)  # pools of the working set divided by these
ROUNDS = 1  # it is exact


@dataclass(frozen=True)
class Row:
    """Found tokens with a pool of `blocks`: by the product, and at best."""

    share: int
    blocks: int
    hits: int
    optimum: int


@dataclass(frozen=True)
class Result:
    requests: int
    queries: int  # whole blocks of all prompts
    working_set: int  # different ones
    infinite: int  # found by a cache that never evicts
    rows: list[Row]


def read_trace(path: Path = TRACE) -> list[list[int]]:
    """For each request the ids of its prompt's whole 512-token blocks."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    prompts = []
    for row in rows:
        ids: list[int] = []
        for run in row["hash_ids"].split():
            first, _, last = run.partition("-")
            ids += range(int(first), int(last or first) + 1)
        prompts.append(ids[: int(row["input_length"]) // TOKENS_PER_ID])
    return prompts


def replay(prompts: Sequence[Sequence[int]], num_blocks: int) -> int:
    """Blocks that the product's cache finds, every prompt being computed whole before the next."""
    blocks = KVCacheManager(KVLayout(1, 1, 1, block_size=1), num_blocks)
    hits = 0
    for key, ids in enumerate(prompts):
        if not 0 < len(ids) < num_blocks:
            continue
        sampling = SamplingParams(max_tokens=1)
        request = Request(key, "r", list(ids), sampling, frozenset(), 0.0)
        known = blocks.match(request)
        if not blocks.begin(request, known, len(ids)):
            raise AssertionError("a request does not fit into an empty pool")
        hits += len(known.block_ids)
        blocks.copied(blocks.take_copies())
        request.num_computed_tokens = len(ids)
        blocks.publish(request)
        blocks.free(key)
    blocks.check_integrity()
    return hits


def infinite(prompts: Sequence[Sequence[int]]) -> int:
    """Blocks found when nothing is ever evicted."""
    seen: set[int] = set()
    hits = 0
    for ids in prompts:
        hits += _run(ids, seen)
        seen.update(ids)
    return hits


def belady(prompts: Sequence[Sequence[int]], num_blocks: int) -> int:
    """Blocks found when what is needed again last gives way; those of the request itself never."""
    uses: dict[int, list[int]] = {}
    for number, ids in enumerate(prompts):
        for id_ in ids:
            uses.setdefault(id_, []).append(number)
    for numbers in uses.values():
        numbers.reverse()  # the next use is the last element
    held: dict[int, float] = {}  # block -> number of the request that uses it next
    order: list[tuple[float, int]] = []  # the same as a heap, furthest first, with stale entries
    hits = 0
    for ids in prompts:
        for id_ in ids:
            uses[id_].pop()
        if len(ids) >= num_blocks:
            continue
        hits += _run(ids, held)
        for id_ in ids:
            held[id_] = uses[id_][-1] if uses[id_] else math.inf
            heapq.heappush(order, (-held[id_], id_))
        _evict(held, order, set(ids), num_blocks)
    return hits


def _evict(
    held: dict[int, float], order: list[tuple[float, int]], mine: set[int], num_blocks: int
) -> None:
    spared = []
    while len(held) > num_blocks:
        key, id_ = heapq.heappop(order)
        if held.get(id_) != -key:
            continue  # said before its latest use
        if id_ in mine:
            spared.append((key, id_))
        else:
            del held[id_]
    for entry in spared:
        heapq.heappush(order, entry)


def _run(ids: Sequence[int], cached: Container[int]) -> int:
    """How many blocks from the first on are cached without a gap."""
    for count, id_ in enumerate(ids):
        if id_ not in cached:
            return count
    return len(ids)


def measure(rounds: int = ROUNDS) -> Result:
    prompts = read_trace()
    working_set = len({id_ for ids in prompts for id_ in ids})
    rows = []
    for share in SHARES:
        # one block more: a prompt that is cached whole has its last block copied
        size = working_set // share + 1
        rows.append(Row(share, size, replay(prompts, size), belady(prompts, size)))
    queries = sum(map(len, prompts))
    return Result(len(prompts), queries, working_set, infinite(prompts), rows)


def report(result: Result) -> str:
    lines = [
        [
            "the working set" if row.share == 1 else f"1/{row.share} of it",
            f"{row.blocks:,}",
            f"{row.hits / result.queries:.1%}",
            f"{row.hits / result.infinite:.3f}",
            f"{row.hits / row.optimum:.3f}",
        ]
        for row in result.rows
    ]
    header = ["pool", "blocks", "prompt tokens found", "of an infinite cache", "of the optimum"]
    return (
        f"### Prefix cache\n\n{markdown(header, lines)}\n\n{result.requests:,} requests of "
        f"Mooncake's conversation trace, {result.queries:,} whole blocks of {TOKENS_PER_ID} tokens."
    )
