"""A hand count on a small file of records."""

from __future__ import annotations

import dataclasses

import pytest

from experiments.record import Record
from experiments.summary import percentiles, summarise
from experiments.table import compare_table
from tasuki.slo import Slo

SLO = Slo(ttft=1.0, tpot=0.1)
GOOD = Record(
    index=0, prompt_tokens=10, scheduled=0.0, sent=0.001, first=0.5, last=0.9, tokens=5,
    outcome="completed", placement="split", reason="prefill_available", transfer=0.02,
    transfer_bytes=1 << 20,
)  # fmt: skip
LATE = dataclasses.replace(GOOD, scheduled=1.0, sent=1.0, first=2.5, last=2.6)
SLOW = dataclasses.replace(GOOD, scheduled=2.0, sent=2.0, first=2.1, last=4.0)
ONE_TOKEN = dataclasses.replace(GOOD, scheduled=3.0, sent=3.0, first=3.1, last=3.1, tokens=1)
REFUSED = Record(
    index=4, prompt_tokens=10, scheduled=4.0, sent=4.0, first=None, last=None, tokens=0,
    outcome="RESOURCE_EXHAUSTED",
)  # fmt: skip
BROKEN = dataclasses.replace(GOOD, scheduled=0.0, outcome="UNAVAILABLE")


def test_every_record_counts_and_two_are_good() -> None:
    summary = summarise([GOOD, LATE, SLOW, ONE_TOKEN, REFUSED, BROKEN], SLO)
    assert summary.requests == 6
    assert summary.completed == 4
    assert summary.attainment == pytest.approx(2 / 6)
    assert summary.duration == pytest.approx(4.0)
    assert summary.goodput == pytest.approx(2 / 4.0)
    assert summary.tokens_out == 21
    assert summary.placements == {"split, prefill_available": 5}


def test_latency_counts_from_the_scheduled_time() -> None:
    held_up = dataclasses.replace(GOOD, scheduled=0.0, sent=2.0, first=2.1, last=2.2)
    assert held_up.ttft == pytest.approx(2.1)
    assert summarise([held_up], SLO).attainment == 0
    assert summarise([held_up], SLO).send_lag_p99 == pytest.approx(2.0)


def test_percentiles_are_measured_values() -> None:
    values = [float(n) for n in range(1, 101)]
    got = percentiles(values)
    assert (got.p50, got.p95, got.p99) == (50.0, 95.0, 99.0)
    assert percentiles([3.0]).p99 == 3.0


def test_the_table_shows_both_arms() -> None:
    arms = {"split": summarise([GOOD], SLO), "colocated": summarise([REFUSED], SLO)}
    table = compare_table(arms, SLO)
    assert "100 %" in table
    assert "0 %" in table
    assert "20.0 / 20.0 / 20.0" in table  # the transfer, in milliseconds
    assert "placed split, prefill_available" in table
    assert "TTFT 1000 ms, TPOT 100 ms" in table
