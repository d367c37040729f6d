"""Placement as a function: who is chosen, split or local and why, when to wait or refuse."""

from __future__ import annotations

from typing import Any

import pytest

from router.placement import (
    Placement,
    PlacementPolicy,
    PlacementRequest,
    Rejection,
    place,
    prefill_is_busy,
)
from router.workers.worker_snapshot import WorkerSnapshot
from tasuki.messages import Role
from tasuki.reasons import RejectionReason

POLICY = PlacementPolicy(split_min_tokens=64, max_candidates=3)
LONG = PlacementRequest(prompt_len=100, max_tokens=20)


def decode(name: str = "d0", **changes: Any) -> WorkerSnapshot:
    values: dict[str, Any] = dict(
        address=name, worker_id=name, worker_epoch=1, role=Role.DECODE, free_blocks=100,
        total_blocks=100, block_size=16, max_model_len=1000, reports=1,
    )  # fmt: skip
    return WorkerSnapshot(**(values | changes))


def prefill(name: str = "p0", **changes: Any) -> WorkerSnapshot:
    values: dict[str, Any] = dict(
        address=name, worker_id=name, worker_epoch=7, role=Role.PREFILL, free_blocks=100,
        total_blocks=100, block_size=16, max_model_len=1000, reports=1,
    )  # fmt: skip
    return WorkerSnapshot(**(values | changes))


def placed(*workers: WorkerSnapshot, request: PlacementRequest = LONG) -> Placement:
    result = place(request, workers, POLICY)
    assert isinstance(result, Placement)
    return result


def linked(*names: str) -> frozenset[tuple[str, int]]:
    return frozenset((name, 7) for name in names)


# --- which decode worker ---------------------------------------------------------------------


def test_least_loaded_for_its_size_then_most_free() -> None:
    small = decode("small", total_blocks=50, free_blocks=50, running=2)
    large = decode("large", total_blocks=200, free_blocks=20, running=4)
    assert placed(small, large).decode.worker_id == "large"  # 4/200 < 2/50
    assert placed(decode("a", free_blocks=20), decode("b", free_blocks=30)).decode.address == "b"


def test_own_placements_count_as_load_and_as_taken_blocks() -> None:
    busy = decode("a", charged_requests=3)
    assert placed(busy, decode("b", running=2)).decode.worker_id == "b"
    assert placed(decode("a", outstanding=3), decode("b", running=2)).decode.worker_id == "b"
    # 101 positions need 7 blocks: 10 free, 4 promised away, 6 are not enough
    full = decode("a", free_blocks=10, charged_blocks=4)
    assert place(LONG, [full], POLICY) is None
    assert placed(decode("a", free_blocks=10, charged_blocks=3)).decode.worker_id == "a"


@pytest.mark.parametrize("state", [{"live": False}, {"ready": False}, {"draining": True}])
def test_only_usable_workers_are_chosen(state: dict[str, bool]) -> None:
    assert placed(decode("a", **state), decode("b", running=9)).decode.worker_id == "b"


def test_no_usable_worker_is_a_rejection_at_once() -> None:
    assert place(LONG, [], POLICY) == Rejection(RejectionReason.NO_WORKER)
    assert place(LONG, [decode(live=False)], POLICY) == Rejection(RejectionReason.NO_WORKER)
    assert place(LONG, [decode(draining=True)], POLICY) == Rejection(RejectionReason.DRAINING)
    assert place(LONG, [prefill()], POLICY) == Rejection(RejectionReason.NO_WORKER)


def test_what_fits_no_worker_is_too_long_even_if_all_are_idle() -> None:
    tiny = decode(total_blocks=7, free_blocks=7)  # 112 positions
    assert place(LONG, [tiny], POLICY) == Rejection(RejectionReason.TOO_LONG)
    assert place(PlacementRequest(100, 12), [tiny], POLICY) is not None
    short_model = decode(max_model_len=119)
    assert place(LONG, [short_model], POLICY) == Rejection(RejectionReason.TOO_LONG)


def test_what_fits_only_a_lost_worker_is_not_too_long() -> None:
    tiny, lost = decode("a", total_blocks=7), decode("b", live=False)
    assert place(LONG, [tiny, lost], POLICY) == Rejection(RejectionReason.NO_WORKER)


def test_a_worker_that_refused_waits_for_its_next_report_and_then_comes_last() -> None:
    refused = PlacementRequest(100, 20, refused={"a": 5})
    assert place(refused, [decode("a", reports=5)], POLICY) is None
    assert placed(decode("a", reports=6), request=refused).decode.address == "a"
    both = placed(decode("a", reports=6), decode("b", running=50), request=refused)
    assert both.decode.address == "b"


# --- split or local ----------------------------------------------------------------------------


def test_split_names_candidates_least_queued_first() -> None:
    prefills = [
        prefill("p0", reported_tokens=50),
        prefill("p1", reported_tokens=10),
        prefill("p2", charged_tokens=20),
        prefill("p3", reported_tokens=10, charged_tokens=5),
        prefill("p4", reported_tokens=0, draining=True),
    ]
    links = linked("p0", "p1", "p2", "p3", "p4")
    result = placed(decode(open_links=links), *prefills)
    assert [target.worker_id for target in result.candidates] == ["p1", "p3", "p2"]
    assert {target.worker_epoch for target in result.candidates} == {7}
    assert (result.kind, result.reason) == ("split", "prefill_available")


def test_local_reasons() -> None:
    assert placed(decode()).reason == "no_prefill_worker"
    assert placed(decode(), prefill(live=False)).reason == "no_prefill_worker"
    assert placed(decode(), prefill()).reason == "link_down"
    other_epoch = decode(open_links=frozenset({("p0", 8)}))
    assert placed(other_epoch, prefill()).reason == "link_down"  # a link to a dead incarnation
    ready = decode(open_links=linked("p0"))
    short = placed(ready, prefill(), request=PlacementRequest(63, 20))
    assert (short.reason, short.kind, short.candidates) == ("short_prompt", "local", ())
    assert placed(ready, prefill(), request=PlacementRequest(64, 20)).kind == "split"


def test_prefill_busy_needs_a_queue_and_measured_speeds() -> None:
    links = linked("p0")
    queue = prefill(reported_tokens=5000, prefill_speed=1000.0)
    assert placed(decode(open_links=links), queue).kind == "split"  # decode not measured yet
    fast = decode(open_links=links, prefill_speed=1000.0)
    assert placed(fast, queue).reason == "prefill_busy"
    assert placed(fast, prefill(prefill_speed=1000.0)).kind == "split"
    equal = decode(open_links=links, prefill_speed=1000.0, reported_tokens=6000)
    assert placed(equal, queue).kind == "split"  # the decode worker's own queue is longer still


def test_a_queue_that_is_known_to_be_done_is_no_queue() -> None:
    stale = prefill(prefill_speed=1000.0, reported_tokens=5000, credited_tokens=5000)
    fast = decode(open_links=linked("p0"), prefill_speed=1000.0)
    assert placed(fast, stale).kind == "split"
    assert prefill(reported_tokens=10, credited_tokens=99, charged_tokens=5).queued_tokens == 5


def test_a_slow_prefill_worker_is_busy_only_when_its_queue_alone_decides() -> None:
    fast = decode(prefill_speed=1000.0)  # 100 tokens: 0.1 s here
    assert not prefill_is_busy(100, prefill(prefill_speed=500.0), fast)
    assert not prefill_is_busy(100, prefill(prefill_speed=500.0, reported_tokens=40), fast)
    assert prefill_is_busy(100, prefill(prefill_speed=500.0, reported_tokens=60), fast)
