"""SLO arithmetic by METRICS.md: what is good, what is a miss, what is in the denominator."""

from __future__ import annotations

import pytest

from tasuki.slo import Slo, SloResult, judge, summarize

SLO = Slo(ttft=1.0, tpot=0.1)


@pytest.mark.parametrize(
    ("ttft", "tpot", "expected"),
    [
        (1.0, 0.1, SloResult.MET),  # a limit that is just met is met
        (1.001, 0.1, SloResult.TTFT_MISS),
        (1.0, 0.101, SloResult.TPOT_MISS),
        (2.0, 0.2, SloResult.BOTH_MISS),
        (0.5, None, SloResult.MET),  # one token: TPOT is vacuously met
        (2.0, None, SloResult.TTFT_MISS),
    ],
)
def test_judge_completed(ttft: float, tpot: float | None, expected: SloResult) -> None:
    assert judge(SLO, ttft=ttft, tpot=tpot, completed=True) is expected


def test_a_request_that_did_not_complete_failed_however_fast_it_was() -> None:
    assert judge(SLO, ttft=0.01, tpot=0.01, completed=False) is SloResult.FAILED


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_limits_are_finite_and_above_zero(bad: float) -> None:
    with pytest.raises(ValueError, match="expected a finite number"):
        Slo(ttft=bad, tpot=1.0)
    with pytest.raises(ValueError, match="expected a finite number"):
        Slo(ttft=1.0, tpot=bad)


def test_summary_counts_every_arrival_but_a_clients_own_cancel() -> None:
    results = [SloResult.MET] * 6 + [SloResult.TTFT_MISS, SloResult.REJECTED, SloResult.FAILED]
    summary = summarize([*results, SloResult.BOTH_MISS, None, None], duration=3.0)
    assert (summary.arrived, summary.good, summary.cancelled) == (10, 6, 2)
    assert summary.attainment == pytest.approx(0.6)
    assert summary.goodput == pytest.approx(2.0)
    assert sum(summary.counts.values()) == summary.arrived


def test_nothing_arrived() -> None:
    summary = summarize([], duration=0.0)
    assert (summary.attainment, summary.goodput, summary.arrived) == (0.0, 0.0, 0)
