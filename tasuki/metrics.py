"""Every metric family of a router and of a worker, on a registry of its owner.

Knows how to count, not what happened: routers call the families, workers apply samples that their
engine recorded. Seconds and bytes; no unbounded label, never a request id. A family whose labels
are bounded is made with all of them at once, so that zeros show before anything happens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tasuki.errors import TasukiError
from tasuki.messages import MetricSample, Role
from tasuki.reasons import (
    AbandonReason,
    FallbackReason,
    MigrationReason,
    PlacementReason,
    RejectionReason,
)

M = TypeVar("M", Counter, Gauge, Histogram)
Labels = Mapping[str, Sequence[str]]
"""Label names with all their values; a label with no values listed is open (and still bounded)."""

# 1 ms to 100 s, three per factor of ten: fine enough for quantiles, few enough to keep
SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0),
)
SHORT_SECONDS = (0.0005, *SECONDS)  # steps and gaps of small models are shorter than 1 ms
BYTES = tuple(float(1 << n) for n in range(14, 35, 2))  # 16 KiB to 16 GiB
TOKENS = tuple(float(1 << n) for n in range(0, 15))  # 1 to 16,384


class Outcome(StrEnum):
    """How a request ended at its router; exactly one each."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    FAILED = "failed"
    CANCELLED = "cancelled"


SLO_RESULTS = ("met", "ttft_miss", "tpot_miss", "both_miss", "rejected", "failed")
SETUPS = ("split", "colocated")
TTFT_PARTS = ("queue", "reservation", "prefill_queue", "prefill_compute", "fallback", "hop")
PLACEMENT_KINDS = ("split", "local")
ROUTER_WORKER_STATES = ("connecting", "ready", "draining", "lost")
BLOCK_STATES = ("free", "cached", "in_use", "reserved", "quarantined")
HANDOFF_STATES = ("reserved", "dispatched", "transferring", "committed", "abandoned")
LINK_STATES = ("opening", "open", "failed")
STEP_KINDS = ("prefill", "decode", "mixed")
PREFILL_KINDS = ("computed", "cached")
TRANSFER_FAILURES = tuple(AbandonReason)
BUILD_FACTS = ("version", "role", "torch", "device", "dtype", "linears", "attention", "numerics")


class Families:
    """Makes families on one registry, with the prefix and all bounded label values."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

    def counter(self, name: str, help: str, labels: Labels | None = None) -> Counter:
        made = Counter(f"tasuki_{name}", help, tuple(labels or ()), registry=self.registry)
        return _with_zeros(made, labels)

    def gauge(self, name: str, help: str, labels: Labels | None = None) -> Gauge:
        made = Gauge(f"tasuki_{name}", help, tuple(labels or ()), registry=self.registry)
        return _with_zeros(made, labels)

    def histogram(
        self,
        name: str,
        help: str,
        labels: Labels | None = None,
        buckets: Sequence[float] = SECONDS,
    ) -> Histogram:
        made = Histogram(
            f"tasuki_{name}", help, tuple(labels or ()), registry=self.registry, buckets=buckets
        )
        return _with_zeros(made, labels)

    def build(self, facts: Mapping[str, str]) -> None:
        """`build_info`, once per process: 1, with what it was built from as labels."""
        made = self.gauge("build_info", "What runs here; always 1.", dict.fromkeys(BUILD_FACTS, ()))
        made.labels(**{name: facts.get(name, "") for name in BUILD_FACTS}).set(1)


def _with_zeros(family: M, labels: Labels | None) -> M:
    if labels and all(labels.values()):
        for values in itertools.product(*labels.values()):
            family.labels(*values)
    return family


class RouterMetrics:
    """The families of a router; each attribute is one family, named without the prefix."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = Families(registry)
        self.registry = registry
        self.build = make.build
        self._make_requests(make)
        self._make_latencies(make)
        self._make_state(make)

    def _make_requests(self, make: Families) -> None:
        self.requests_total = make.counter(
            "requests_total",
            "Requests that arrived, by how they ended.",
            {"outcome": tuple(Outcome)},
        )
        self.slo_requests_total = make.counter(
            "slo_requests_total",
            "Requests by whether they met their objective; the rate of result=met is goodput.",
            {"result": SLO_RESULTS, "setup": SETUPS},
        )
        self.slo_misses_total = make.counter(
            "slo_misses_total",
            "Requests that missed their objective, by the part that overran most.",
            {"blamed": (*TTFT_PARTS, "decode")},
        )
        self.migrations_total = make.counter(
            "migrations_total",
            "Requests that another decode worker went on with.",
            {"reason": tuple(MigrationReason)},
        )
        self.placements_total = make.counter(
            "placements_total",
            "Prompts by where they were computed and why there.",
            {"kind": PLACEMENT_KINDS, "reason": tuple(PlacementReason)},
        )
        self.fallbacks_total = make.counter(
            "fallbacks_total",
            "Prompts whose prefill worker did not deliver everything.",
            {"reason": tuple(FallbackReason)},
        )
        self.rejections_total = make.counter(
            "rejections_total", "Requests refused.", {"reason": tuple(RejectionReason)}
        )
        self.negative_hop_total = make.counter(
            "negative_hop_total", "Requests whose parts exceed their TTFT: a bug in a clock."
        )

    def _make_latencies(self, make: Families) -> None:
        self.ttft_seconds = make.histogram(
            "ttft_seconds", "Arrival at the router until the first token left it."
        )
        self.tpot_seconds = make.histogram(
            "tpot_seconds", "(last - first token) / (n - 1), per request.", buckets=SHORT_SECONDS
        )
        self.inter_token_latency_seconds = make.histogram(
            "inter_token_latency_seconds",
            "Gap between consecutive tokens of a request, where they leave the router.",
            buckets=SHORT_SECONDS,
        )
        self.e2e_seconds = make.histogram(
            "e2e_seconds", "Arrival at the router until the last token left it."
        )
        self.queue_seconds = make.histogram("queue_seconds", "Arrival until placed.")
        self.ttft_part_seconds = make.histogram(
            "ttft_part_seconds",
            "TTFT taken apart; the parts of a request add up to its TTFT.",
            {"part": TTFT_PARTS},
            buckets=SHORT_SECONDS,
        )

    def _make_state(self, make: Families) -> None:
        self.admission_queue_requests = make.gauge(
            "admission_queue_requests", "Requests that wait for a placement."
        )
        self.oldest_waiting_seconds = make.gauge(
            "oldest_waiting_seconds", "Age of the oldest request that waits for a placement."
        )
        self.workers = make.gauge(
            "workers",
            "Workers this router knows.",
            {"role": tuple(Role), "state": ROUTER_WORKER_STATES},
        )


class WorkerMetrics:
    """The families of a worker, changed by samples that its engine recorded; how often it was
    started again only its server knows.
    """

    def __init__(self, role: Role, registry: CollectorRegistry) -> None:
        make = Families(registry)
        self.registry = registry
        self.build = make.build
        self.engine_restarts_total = make.counter(
            "engine_restarts_total", "Engines that were started in place of one that died."
        )
        self._families: dict[str, Counter | Gauge | Histogram] = {
            **_engine_families(make),
            **(_prefill_families(make) if role is Role.PREFILL else _decode_families(make)),
        }

    def apply(self, sample: MetricSample) -> None:
        """Apply one change. Raises TasukiError for a name, operation or label that does not exist:
        a bug in the engine, which the server logs and survives.
        """
        family = self._families.get(sample.name)
        if family is None:
            raise TasukiError(
                f"no metric is named {sample.name!r} on this role; see tasuki.metrics"
            )
        try:
            _apply(family.labels(**sample.labels) if sample.labels else family, sample)
        except (ValueError, TypeError) as error:
            labels = ", ".join(f"{key}={value}" for key, value in sample.labels.items())
            raise TasukiError(
                f"metric {sample.name} does not take {sample.op} {sample.value} with labels "
                f"{{{labels}}}: {error}"
            ) from error

    def apply_all(self, samples: Iterable[MetricSample]) -> None:
        """Apply in order. Raises like `apply`, at the first that fails."""
        for sample in samples:
            self.apply(sample)


def _apply(family: Counter | Gauge | Histogram, sample: MetricSample) -> None:
    match sample.op, family:
        case "inc", Counter() | Gauge():
            family.inc(sample.value)
        case "set", Gauge():
            family.set(sample.value)
        case "observe", Histogram():
            family.observe(sample.value)
        case _:
            raise TypeError(f"it is a {type(family).__name__.lower()}")


def _engine_families(make: Families) -> dict[str, Counter | Gauge | Histogram]:
    """What both roles have: there is one engine for both."""
    return {
        "kv_blocks": make.gauge(
            "kv_blocks", "KV blocks; the states sum to the total.", {"state": BLOCK_STATES}
        ),
        "kv_block_leaks_total": make.counter(
            "kv_block_leaks_total", "KV blocks that were held by nobody: a bug."
        ),
        "step_seconds": make.histogram(
            "step_seconds", "Duration of one engine step.", {"kind": STEP_KINDS}, SHORT_SECONDS
        ),
        "batch_tokens": make.histogram("batch_tokens", "Tokens in one step.", buckets=TOKENS),
        "links": make.gauge("links", "Links to workers of the other role.", {"state": LINK_STATES}),
        "running_requests": make.gauge("running_requests", "Requests in the running batch."),
        "waiting_requests": make.gauge("waiting_requests", "Requests that wait in this worker."),
        "oldest_waiting_seconds": make.gauge(
            "oldest_waiting_seconds", "Age of the oldest request that waits in this worker."
        ),
        "preemptions_total": make.counter(
            "preemptions_total", "Requests whose KV was given up and is computed again."
        ),
        "slot_steps_total": make.counter(
            "slot_steps_total",
            "Slots of the batch over all steps: those taken, and those in which work was done.",
            {"kind": ("reserved", "useful")},
        ),
        "prefix_cache_queries_total": make.counter(
            "prefix_cache_queries_total", "Tokens looked up in the prefix cache at admission."
        ),
        "prefix_cache_hits_total": make.counter(
            "prefix_cache_hits_total", "Tokens found there, whose KV was shared."
        ),
        "stale_results_dropped_total": make.counter(
            "stale_results_dropped_total", "Results that came too late or for another epoch."
        ),
    }


def _prefill_families(make: Families) -> dict[str, Counter | Gauge | Histogram]:
    return {
        "prefill_queue_tokens": make.gauge(
            "prefill_queue_tokens", "Prompt tokens accepted and not computed yet."
        ),
        "prefill_seconds": make.histogram(
            "prefill_seconds", "First scheduled until the first token was sampled."
        ),
        "prefill_tokens_total": make.counter(
            "prefill_tokens_total",
            "Prompt tokens by where their KV came from.",
            {"kind": PREFILL_KINDS},
        ),
        "kv_sent_bytes_total": make.counter("kv_sent_bytes_total", "Bytes of KV sent."),
    }


def _decode_families(make: Families) -> dict[str, Counter | Gauge | Histogram]:
    return {
        "kv_transfer_seconds": make.histogram(
            "kv_transfer_seconds", "First Announce seen until committed.", buckets=SHORT_SECONDS
        ),
        "kv_transfer_exposed_seconds": make.histogram(
            "kv_transfer_exposed_seconds", "FirstToken seen until committed.", buckets=SHORT_SECONDS
        ),
        "kv_transfer_bytes": make.histogram(
            "kv_transfer_bytes", "Bytes of KV of one committed handoff.", buckets=BYTES
        ),
        "handoffs": make.gauge(
            "handoffs", "Live requests by how far their handoff is.", {"state": HANDOFF_STATES}
        ),
        "handoff_seconds": make.histogram(
            "handoff_seconds",
            "Time of one handoff in a state, whatever its end.",
            {"state": HANDOFF_STATES},
            SHORT_SECONDS,
        ),
        "kv_transfer_failures_total": make.counter(
            "kv_transfer_failures_total",
            "Handoffs that ended neither by a commit nor by a finish.",
            {"reason": TRANSFER_FAILURES},
        ),
        "kv_received_bytes_total": make.counter("kv_received_bytes_total", "Bytes of KV received."),
        "fallbacks_total": make.counter(
            "fallbacks_total",
            "Prompts whose prefill worker did not deliver everything.",
            {"reason": tuple(FallbackReason)},
        ),
    }
