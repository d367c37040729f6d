"""Where a request goes: a decode worker, and prefill workers to try, or why not. Pure.

Takes snapshots and returns data; the same code runs under a simulator's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from router.workers.worker_snapshot import WorkerSnapshot
from tasuki.messages import PrefillTarget, Role
from tasuki.reasons import PlacementReason, RejectionReason


@dataclass(frozen=True)
class PlacementPolicy:
    """What an operator can choose about placement."""

    split_min_tokens: int = 64
    max_candidates: int = 3


@dataclass(frozen=True)
class PlacementRequest:
    """What placement needs to know of a request. Token counts are positions of KV."""

    prompt_len: int
    max_tokens: int
    n: int = 1  # samples, each of them a request to the worker once the prompt is computed
    patient: bool = False  # it was on a worker that is gone: waits for one instead of being refused
    goes_on: bool = False  # it has output already, and is computed anew where it decodes
    refused: Mapping[str, int] = field(default_factory=dict)
    """Decode workers (by address) that refused it, and how many reports each had given then."""


@dataclass(frozen=True)
class Placement:
    """Go to `decode`; it tries `candidates` in order. `reason` says why split or why local."""

    decode: WorkerSnapshot
    candidates: tuple[PrefillTarget, ...]
    reason: PlacementReason

    @property
    def kind(self) -> str:
        return "split" if self.candidates else "local"


@dataclass(frozen=True)
class Rejection:
    """The request cannot be placed, and waiting would not help: too_long, no_worker or draining."""

    reason: RejectionReason


def place(
    request: PlacementRequest, workers: Sequence[WorkerSnapshot], policy: PlacementPolicy
) -> Placement | Rejection | None:
    """Choose for one request; None means: wait until some worker has room."""
    decodes = [worker for worker in workers if worker.role is Role.DECODE]
    usable = [worker for worker in decodes if worker.usable]
    known = [worker for worker in decodes if worker.total_blocks > 0]
    if known and not any(fits(request, worker) for worker in known):
        return Rejection(RejectionReason.TOO_LONG)
    fitting = [worker for worker in usable if fits(request, worker)]
    if not fitting and request.patient:
        return None
    if not fitting:
        leaving = any(worker.draining for worker in decodes)
        only_leaving = leaving and not usable
        return Rejection(RejectionReason.DRAINING if only_leaving else RejectionReason.NO_WORKER)
    roomy = [worker for worker in fitting if has_room(request, worker)]
    if not roomy:
        return None
    decode = min(roomy, key=lambda worker: _cost(request, worker))
    candidates, reason = _choose_prefill(request, decode, workers, policy)
    return Placement(decode, candidates, reason)


def fits(request: PlacementRequest, worker: WorkerSnapshot) -> bool:
    """Whether the worker could hold the request at its longest, were it empty."""
    return request.prompt_len + request.max_tokens <= worker.max_tokens_per_request


def has_room(request: PlacementRequest, worker: WorkerSnapshot) -> bool:
    """Whether prompt and first token fit now; no after a refusal, until the next report."""
    if request.refused.get(worker.address, -1) >= worker.reports:
        return False
    return worker.blocks_for(request.prompt_len + 1) <= worker.unclaimed_blocks


def _cost(request: PlacementRequest, worker: WorkerSnapshot) -> tuple[bool, float, int, str]:
    """Smaller is better: not refused before, little load for its size, much free memory."""
    return (
        worker.address in request.refused,
        worker.load / worker.total_blocks,
        -worker.unclaimed_blocks,
        worker.worker_id,
    )


def _choose_prefill(
    request: PlacementRequest,
    decode: WorkerSnapshot,
    workers: Sequence[WorkerSnapshot],
    policy: PlacementPolicy,
) -> tuple[tuple[PrefillTarget, ...], PlacementReason]:
    """Prefill workers to try, least queued first, or none; and the reason for either."""
    if request.goes_on:
        return (), PlacementReason.MIGRATED
    prefills = [worker for worker in workers if worker.role is Role.PREFILL and worker.usable]
    if not prefills:
        return (), PlacementReason.NO_PREFILL_WORKER
    if request.prompt_len < policy.split_min_tokens:
        return (), PlacementReason.SHORT_PROMPT
    linked = [worker for worker in prefills if worker.identity in decode.open_links]
    if not linked:
        return (), PlacementReason.LINK_DOWN
    linked.sort(key=lambda worker: (worker.queued_tokens, worker.worker_id))
    if prefill_is_busy(request.prompt_len, linked[0], decode):
        return (), PlacementReason.PREFILL_BUSY
    chosen = tuple(worker.target for worker in linked[: policy.max_candidates])
    return chosen, PlacementReason.PREFILL_AVAILABLE


REPORT_AGE = 0.1  # seconds; a load report can be so old


def prefill_is_busy(prompt_len: int, prefill: WorkerSnapshot, decode: WorkerSnapshot) -> bool:
    """Whether waiting for the prefill worker makes the split longer than computing the prompt here.

    Needs measured speeds on both sides. The wait must be what decides: a prefill worker that is
    merely slower than the decode worker still takes work off it, until its queue alone would take
    longer than computing here.
    """
    if not (prefill.prefill_speed > 0 and decode.prefill_speed > 0):
        return False
    wait = prefill.queued_tokens / prefill.prefill_speed
    if wait < REPORT_AGE:
        return False  # it may be over already
    compute = prompt_len / prefill.prefill_speed
    local = (decode.queued_tokens + prompt_len) / decode.prefill_speed
    return wait > local or (compute <= local < wait + compute)
