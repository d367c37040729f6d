"""The admission queue: bounded, first in first out, a deadline per entry."""

from __future__ import annotations

import pytest

from router.admission import AdmissionQueue
from tasuki.errors import QueueFullError


def test_first_in_first_out_and_bounded() -> None:
    queue: AdmissionQueue[str] = AdmissionQueue(2)
    first = queue.offer("a", now=0.0, deadline=9.0)
    queue.offer("b", now=1.0, deadline=9.0)
    with pytest.raises(QueueFullError, match="2 requests wait"):
        queue.offer("c", now=2.0, deadline=9.0)
    assert queue.head() is first
    assert queue.take() is first
    assert queue.take().item == "b"
    assert queue.head() is None


def test_expiry_takes_only_the_late_ones_wherever_they_stand() -> None:
    queue: AdmissionQueue[str] = AdmissionQueue(9)
    queue.offer("patient", now=0.0, deadline=10.0)
    queue.offer("hurried", now=0.0, deadline=2.0)
    assert queue.next_deadline() == 2.0
    assert queue.expire(1.9) == []
    assert [entry.item for entry in queue.expire(2.0)] == ["hurried"]
    assert len(queue) == 1
    assert queue.next_deadline() == 10.0


def test_an_entry_that_comes_back_stands_at_the_head_even_of_a_full_queue() -> None:
    queue: AdmissionQueue[str] = AdmissionQueue(1)
    placed = queue.offer("placed", now=0.0, deadline=5.0)
    queue.take()
    queue.offer("next", now=1.0, deadline=5.0)
    queue.offer_again(placed)
    assert queue.head() is placed
    assert queue.oldest_waiting(3.0) == 3.0  # age counts from its first arrival


def test_withdraw_is_idempotent_and_harmless_after_take() -> None:
    queue: AdmissionQueue[str] = AdmissionQueue(3)
    gone = queue.offer("gone", now=0.0, deadline=5.0)
    stays = queue.offer("stays", now=0.0, deadline=5.0)
    queue.withdraw(gone)
    queue.withdraw(gone)
    assert queue.take() is stays
    queue.withdraw(stays)
    assert len(queue) == 0
    assert queue.oldest_waiting(9.0) == 0.0
    assert queue.next_deadline() is None
