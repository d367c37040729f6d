"""What a run amounts to: percentiles, attainment, goodput. Pure arithmetic over records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.record import Record
from tasuki.slo import Slo, SloResult, judge


@dataclass(frozen=True)
class Percentiles:
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Summary:
    requests: int
    completed: int
    tokens_out: int
    duration: float  # from the first scheduled arrival to the last token, seconds
    ttft: Percentiles
    tpot: Percentiles
    transfer: Percentiles | None  # None: nothing was transferred
    transfer_bytes: int
    attainment: float  # good / arrived
    goodput: float  # good requests per second of `duration`
    placements: dict[str, int]
    fallbacks: dict[str, int]
    send_lag_p99: float  # how late the generator was, seconds


def percentiles(values: Sequence[float]) -> Percentiles:
    """Nearest-rank percentiles: each is a value that was measured. NaN when there are none."""
    if not values:
        return Percentiles(math.nan, math.nan, math.nan)
    ordered = sorted(values)

    def rank(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return Percentiles(rank(0.50), rank(0.95), rank(0.99))


def is_good(record: Record, slo: Slo) -> bool:
    if record.ttft is None:
        return False
    tpot = record.tpot if record.tokens > 1 else None
    result = judge(slo, ttft=record.ttft, tpot=tpot, completed=record.completed)
    return result is SloResult.MET


def summarise(records: Sequence[Record], slo: Slo) -> Summary:
    """Every record is in the denominator, whatever became of it."""
    good = sum(is_good(record, slo) for record in records)
    end = max((record.last or record.sent for record in records), default=0.0)
    begin = min((record.scheduled for record in records), default=0.0)
    duration = max(end - begin, 1e-9)
    transfers = [record.transfer for record in records if record.transfer_bytes]
    return Summary(
        requests=len(records),
        completed=sum(record.completed for record in records),
        tokens_out=sum(record.tokens for record in records),
        duration=duration,
        ttft=percentiles([r.ttft for r in records if r.ttft is not None]),
        tpot=percentiles([r.tpot for r in records if r.tokens > 1]),
        transfer=percentiles(transfers) if transfers else None,
        transfer_bytes=sum(record.transfer_bytes for record in records),
        attainment=good / len(records) if records else math.nan,
        goodput=good / duration,
        placements=dict(Counter(f"{r.placement}, {r.reason}" for r in records if r.placement)),
        fallbacks=dict(Counter(record.fallback for record in records if record.fallback)),
        send_lag_p99=percentiles([r.sent - r.scheduled for r in records]).p99,
    )
