"""Counts one request in the router's metrics: exactly one outcome, at most one SLO result.

Knows nothing about streams; takes a Timeline and how the request ended. A request that its own
caller cancelled has an outcome and no SLO result: it is reported apart.
"""

from __future__ import annotations

import logging

from tasuki.metrics import Outcome, RouterMetrics
from tasuki.reasons import FallbackReason, MigrationReason, PlacementReason, RejectionReason
from tasuki.slo import Slo, SloResult, judge
from tasuki.timeline import Timeline, TtftParts

log = logging.getLogger(__name__)


class Recorder:
    """`setup` is "split" or "colocated": of the cluster, not of a placement."""

    def __init__(self, metrics: RouterMetrics, setup: str) -> None:
        self._metrics = metrics
        self._setup = setup

    def placed(self, kind: str, reason: str) -> None:
        """The decode worker said where it has the prompt computed."""
        self._metrics.placements_total.labels(kind, _bounded(PlacementReason, reason)).inc()

    def fell_back(self, reason: str) -> None:
        self._metrics.fallbacks_total.labels(_bounded(FallbackReason, reason)).inc()

    def migrated(self, reason: MigrationReason) -> None:
        """Another decode worker goes on with it."""
        self._metrics.migrations_total.labels(reason).inc()

    def first_token(self, timeline: Timeline) -> None:
        """The first token left: TTFT and its parts are final."""
        parts, ttft = timeline.parts(), timeline.ttft
        assert parts is not None
        assert ttft is not None
        self._metrics.ttft_seconds.observe(ttft)
        for part, seconds in parts.as_dict().items():
            self._metrics.ttft_part_seconds.labels(part).observe(seconds)
        if parts.residual_is_negative:
            self._metrics.negative_hop_total.inc()
            log.error("parts of a TTFT exceed it by %.6f s: %s", -parts.hop, parts)

    def queued(self, seconds: float) -> None:
        """A request was placed for good, or gave up, after so long."""
        self._metrics.queue_seconds.observe(seconds)

    def gaps(self, seconds: list[float]) -> None:
        for gap in seconds:
            self._metrics.inter_token_latency_seconds.observe(gap)

    def completed(self, timeline: Timeline, slo: Slo) -> SloResult:
        """Judge a request that ran to its end."""
        if timeline.ttft is None or timeline.e2e is None:
            return self.failed()
        if timeline.tpot is not None:
            self._metrics.tpot_seconds.observe(timeline.tpot)
        self._metrics.e2e_seconds.observe(timeline.e2e)
        result = judge(slo, ttft=timeline.ttft, tpot=timeline.tpot, completed=True)
        blamed = blamed_part(result, slo, timeline)
        if blamed is not None:
            self._metrics.slo_misses_total.labels(blamed).inc()
        return self._count(Outcome.COMPLETED, result)

    def rejected(self, reason: str) -> SloResult:
        """Refused before it was on any worker, or by every worker it was offered to."""
        self._metrics.rejections_total.labels(_bounded(RejectionReason, reason)).inc()
        return self._count(Outcome.REJECTED, SloResult.REJECTED)

    def failed(self) -> SloResult:
        """Taken on, and not completed: a miss, however it came about."""
        return self._count(Outcome.FAILED, SloResult.FAILED)

    def cancelled(self) -> None:
        """Its own caller went away."""
        self._metrics.requests_total.labels(Outcome.CANCELLED).inc()

    def _count(self, outcome: Outcome, result: SloResult) -> SloResult:
        self._metrics.requests_total.labels(outcome).inc()
        self._metrics.slo_requests_total.labels(result, self._setup).inc()
        return result


def blamed_part(result: SloResult, slo: Slo, timeline: Timeline) -> str | None:
    """Which part a miss is blamed on: the longest one of a late first token, else "decode".

    When both limits were missed, the one that was exceeded by the larger factor decides.
    """
    parts = timeline.parts()
    if result is SloResult.MET or parts is None or timeline.ttft is None:
        return None
    if result is SloResult.BOTH_MISS and timeline.tpot is not None:
        late = timeline.ttft / slo.ttft >= timeline.tpot / slo.tpot
        result = SloResult.TTFT_MISS if late else SloResult.TPOT_MISS
    return _longest(parts) if result is SloResult.TTFT_MISS else "decode"


def _longest(parts: TtftParts) -> str:
    named = parts.as_dict()
    return max(named, key=lambda part: named[part])


def _bounded(
    reasons: type[PlacementReason] | type[FallbackReason] | type[RejectionReason], word: str
) -> str:
    """A label value is one of a fixed few, whatever another process (a newer one?) says."""
    if word in reasons.__members__.values():
        return word
    log.error("unknown %s %r", reasons.__name__, word)
    return "unknown"
