"""Every family is there from the start, with zeros; samples change them; bugs are loud."""

from __future__ import annotations

import dataclasses

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tasuki.errors import TasukiError
from tasuki.messages import MetricSample, Role
from tasuki.metrics import SLO_RESULTS, TTFT_PARTS, RouterMetrics, WorkerMetrics
from tasuki.reasons import FallbackReason, PlacementReason
from tasuki.slo import SloResult
from tasuki.timeline import TtftParts

ROUTER = """requests_total slo_requests_total rejections_total ttft_seconds tpot_seconds
inter_token_latency_seconds e2e_seconds queue_seconds ttft_part_seconds placements_total workers
admission_queue_requests oldest_waiting_seconds slo_misses_total migrations_total"""
BOTH = """kv_blocks kv_block_leaks_total running_requests waiting_requests preemptions_total
step_seconds links stale_results_dropped_total batch_tokens oldest_waiting_seconds
prefix_cache_queries_total prefix_cache_hits_total slot_steps_total engine_restarts_total"""
PREFILL = "kv_sent_bytes_total prefill_tokens_total prefill_queue_tokens prefill_seconds"
DECODE = """kv_received_bytes_total kv_transfer_seconds kv_transfer_exposed_seconds
kv_transfer_bytes fallbacks_total handoffs handoff_seconds kv_transfer_failures_total"""


def sample(name: str, op: str, value: float = 1, **labels: str) -> MetricSample:
    return MetricSample(name=name, op=op, value=value, labels=labels)


def page(registry: CollectorRegistry) -> set[str]:
    """The names of all families that have at least one sample, as a scrape shows them."""
    lines = generate_latest(registry).decode().splitlines()
    shown = {line.split("{")[0].split(" ")[0] for line in lines if not line.startswith("#")}
    return {name.removesuffix("_count") for name in shown}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_router_shows_zeros_before_anything_happens(registry: CollectorRegistry) -> None:
    RouterMetrics(registry)
    missing = {f"tasuki_{name}" for name in ROUTER.split()} - page(registry)
    assert not missing
    labels = {"kind": "split", "reason": PlacementReason.PREFILL_AVAILABLE.value}
    assert registry.get_sample_value("tasuki_placements_total", labels) == 0
    for result in SloResult:
        labels = {"result": result.value, "setup": "split"}
        assert registry.get_sample_value("tasuki_slo_requests_total", labels) == 0


@pytest.mark.parametrize(
    ("role", "own", "foreign"),
    [
        (Role.DECODE, DECODE, PREFILL),
        (Role.PREFILL, PREFILL, DECODE),
    ],
)
def test_worker_shows_its_own_families(
    registry: CollectorRegistry, role: Role, own: str, foreign: str
) -> None:
    WorkerMetrics(role, registry)
    shown = page(registry)
    assert not {f"tasuki_{name}" for name in (*BOTH.split(), *own.split())} - shown
    assert not {f"tasuki_{name}" for name in foreign.split()} & shown


def test_bounded_words_agree_with_their_sources() -> None:
    assert set(SLO_RESULTS) == set(SloResult)
    assert [field.name for field in dataclasses.fields(TtftParts)] == list(TTFT_PARTS)


def test_samples_are_applied(registry: CollectorRegistry) -> None:
    metrics = WorkerMetrics(Role.DECODE, registry)
    metrics.apply_all(
        [
            sample("kv_blocks", "set", 7, state="free"),
            sample("kv_blocks", "set", 5, state="free"),
            sample("kv_received_bytes_total", "inc", 300),
            sample("fallbacks_total", "inc", reason=FallbackReason.STALLED.value),
            sample("kv_transfer_seconds", "observe", 0.003),
            sample("running_requests", "inc", -2),
        ]
    )
    read = registry.get_sample_value
    assert read("tasuki_kv_blocks", {"state": "free"}) == 5
    assert read("tasuki_kv_received_bytes_total") == 300
    assert read("tasuki_fallbacks_total", {"reason": "stalled"}) == 1
    assert read("tasuki_kv_transfer_seconds_bucket", {"le": "0.005"}) == 1
    assert read("tasuki_kv_transfer_seconds_bucket", {"le": "0.002"}) == 0
    assert read("tasuki_running_requests") == -2


@pytest.mark.parametrize(
    "wrong",
    [
        sample("no_such_metric", "inc"),
        sample("kv_sent_bytes_total", "inc"),  # belongs to the other role
        sample("kv_blocks", "set", color="red"),
        sample("kv_blocks", "set"),  # lacks its label
        sample("running_requests", "set", state="free"),
        sample("running_requests", "observe"),
        sample("preemptions_total", "inc", -1),
        sample("preemptions_total", "set"),
        sample("preemptions_total", "add"),
    ],
)
def test_a_wrong_sample_is_a_typed_error_that_names_the_metric(
    registry: CollectorRegistry, wrong: MetricSample
) -> None:
    metrics = WorkerMetrics(Role.DECODE, registry)
    with pytest.raises(TasukiError, match=wrong.name):
        metrics.apply(wrong)


def test_build_info_has_fixed_labels(registry: CollectorRegistry) -> None:
    metrics = WorkerMetrics(Role.DECODE, registry)
    metrics.build({"version": "1.2", "role": "decode", "torch": "2.13", "unknown": "left out"})
    (family,) = (f for f in registry.collect() if f.name == "tasuki_build_info")
    (only,) = family.samples
    assert only.value == 1
    assert only.labels["version"] == "1.2"
    assert only.labels["attention"] == ""
    assert "unknown" not in only.labels


def test_two_workers_in_one_process_share_nothing() -> None:
    first, second = CollectorRegistry(), CollectorRegistry()
    WorkerMetrics(Role.DECODE, first).apply(sample("preemptions_total", "inc"))
    WorkerMetrics(Role.DECODE, second)
    assert first.get_sample_value("tasuki_preemptions_total") == 1
    assert second.get_sample_value("tasuki_preemptions_total") == 0
