"""The router's gauges, each asked for at every scrape: they cannot go stale.

Knows where the numbers stand, not what they mean. The metrics page runs on the event loop, so that
reading them needs no lock.
"""

from __future__ import annotations

from functools import partial

from router.placer import Placer
from router.workers.registry import Registry
from router.workers.watched_worker import WorkerState
from tasuki.clock import Clock
from tasuki.messages import Role
from tasuki.metrics import RouterMetrics


def follow(metrics: RouterMetrics, registry: Registry, placer: Placer, clock: Clock) -> None:
    """Tie the gauges of `metrics` to the registry's and the placer's state."""
    queue = placer.queue
    metrics.admission_queue_requests.set_function(lambda: float(len(queue)))
    metrics.oldest_waiting_seconds.set_function(lambda: queue.oldest_waiting(clock()))
    for role in Role:
        for state in WorkerState:
            count = partial(_count, registry, role, state)
            metrics.workers.labels(role, state).set_function(count)


def _count(registry: Registry, role: Role, state: WorkerState) -> float:
    return float(registry.states()[role, state])
