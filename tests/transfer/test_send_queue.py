from __future__ import annotations

from tasuki.transfer.send_queue import DIRECT_BYTES, SendQueue

BLOCK = DIRECT_BYTES // 2


def take_all(queue: SendQueue) -> list[tuple[str, int, tuple[int, ...]]]:
    taken = []
    while (run := queue.next_run()) is not None:
        queue.take(run)
        taken.append((run.handoff_id, run.first_block, run.block_ids))
    return taken


def test_contiguous_runs_go_as_they_are_up_to_the_segment_size() -> None:
    queue = SendQueue(BLOCK, 4 * BLOCK)
    queue.add("a", 2, [10, 11, 12, 13, 14, 15])
    assert take_all(queue) == [("a", 2, (10, 11, 12, 13)), ("a", 6, (14, 15))]
    assert queue.pending("a") == 0


def test_a_run_worth_sending_ends_at_its_gap() -> None:
    queue = SendQueue(BLOCK, 4 * BLOCK)
    queue.add("a", 0, [10, 11, 30, 31])
    assert take_all(queue) == [("a", 0, (10, 11)), ("a", 2, (30, 31))]


def test_short_runs_are_gathered() -> None:
    queue = SendQueue(BLOCK, 4 * BLOCK)
    queue.add("a", 0, [10, 20, 9, 8, 7])
    run = queue.next_run()
    assert run is not None
    assert not run.is_contiguous
    assert take_all(queue) == [("a", 0, (10, 20, 9, 8)), ("a", 4, (7,))]


def test_handoffs_are_served_in_turn_by_bytes() -> None:
    queue = SendQueue(BLOCK, 2 * BLOCK)
    queue.add("a", 0, list(range(0, 8)))
    queue.add("b", 0, list(range(20, 24)))
    order = [entry[0] for entry in take_all(queue)]
    assert order == ["a", "b", "a", "b", "a", "a"]


def test_a_late_or_idle_handoff_gets_its_share_but_no_credit() -> None:
    queue = SendQueue(BLOCK, 2 * BLOCK)
    queue.add("idle", 0, [50, 51])
    queue.add("a", 0, list(range(0, 12)))
    for _ in range(4):
        run = queue.next_run()
        assert run is not None
        queue.take(run)
    queue.add("idle", 2, list(range(52, 60)))
    order = [entry[0] for entry in take_all(queue)]
    assert order.index("idle") <= 1
    assert order[:4].count("idle") == 2


def test_dropped_offers_are_gone() -> None:
    queue = SendQueue(BLOCK, 2 * BLOCK)
    queue.add("a", 0, [1, 2, 3])
    queue.drop("a")
    queue.drop("a")
    assert queue.next_run() is None
    assert queue.pending("a") == 0
