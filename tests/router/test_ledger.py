"""Charges: what a report cannot show yet stands, what it shows goes, nothing is counted twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.ledger import Ledger, WorkerLedgers


def test_a_charge_stands_until_a_report_after_its_acknowledgement() -> None:
    ledger = Ledger()
    ledger.charge(1, 10)
    ledger.charge(2, 5)
    ledger.reported()  # older than both
    assert ledger.total == 15
    ledger.acknowledge(1)
    assert ledger.total == 15
    ledger.reported()
    assert ledger.total == 5
    ledger.discharge(2)
    ledger.discharge(2)
    assert ledger.total == 0


def test_work_that_a_report_still_shows_is_a_credit_until_the_next_one() -> None:
    ledger = Ledger()
    ledger.charge(1, 10)
    ledger.discharge(1)
    assert ledger.credit == 0  # no report ever had it
    ledger.charge(2, 7)
    ledger.acknowledge(2)
    ledger.reported()
    assert (ledger.total, ledger.credit, ledger.is_empty) == (0, 0, False)
    ledger.discharge(2)
    ledger.discharge(2)
    assert (ledger.total, ledger.credit, ledger.is_empty) == (0, 7, True)
    ledger.reported()
    assert ledger.credit == 0


def test_discharge_covers_all_kinds() -> None:
    ledgers = WorkerLedgers()
    for ledger in ledgers.all():
        ledger.charge(7, 3)
    ledgers.discharge(7)
    assert [ledger.total for ledger in ledgers.all()] == [0, 0, 0]


operation = st.tuples(
    st.sampled_from(["charge", "acknowledge", "discharge", "reported", "clear"]),
    st.integers(0, 4),
    st.integers(0, 100),
)


@given(st.lists(operation, max_size=40))
def test_the_total_is_always_the_sum(operations: list[tuple[str, int, int]]) -> None:
    ledger = Ledger()
    for name, key, amount in operations:
        if name == "charge":
            ledger.charge(key, amount)
        elif name in ("reported", "clear"):
            getattr(ledger, name)()
        else:
            getattr(ledger, name)(key)
        ledger.check_integrity()
    for key in range(5):
        ledger.discharge(key)
    assert (ledger.total, ledger.is_empty) == (0, True)
