"""The quick comparison on the live clusters: every request completes, on both setups."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from cli.cluster.local_cluster import LocalCluster
from experiments.quick import QuickComparison
from tasuki.slo import Slo

pytestmark = [pytest.mark.dist, pytest.mark.asyncio(loop_scope="session")]


async def test_both_setups_answer_the_same_requests(
    split: LocalCluster, colocated: LocalCluster, tiny_model: Path
) -> None:
    slo = Slo(ttft=5.0, tpot=1.0)
    comparison = QuickComparison.prepare(tiny_model, slo, time_scale=0.3, seed=0)
    comparison = dataclasses.replace(comparison, requests=comparison.requests[:30])
    arms = {
        "split": await comparison.run_arm(split.router_address),
        "colocated": await comparison.run_arm(colocated.router_address),
    }
    for records in arms.values():
        assert [record.outcome for record in records] == ["completed"] * 30
        for record, request in zip(records, comparison.requests, strict=True):
            assert record.tokens == request.max_tokens
            assert record.sent >= record.scheduled
    assert any(record.transfer_bytes for record in arms["split"])
    assert not any(record.transfer_bytes for record in arms["colocated"])
    report = comparison.report(arms)
    for word in ("TTFT", "TPOT", "KV transfer", "attainment", "goodput", "may be chance"):
        assert word in report
