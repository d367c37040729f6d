"""What a router knows about its requests on one worker before that worker's reports show it. Pure.

A report is a few hundred milliseconds old; without this, a burst between two reports would all go
to the same worker, and work that is done would still count as a queue. A charge stands from its
placement until the first report after the worker was seen to have taken it on: from then on the
report has it. If it is discharged after that, it is a credit until the next report.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Ledger:
    """Amounts of one kind (blocks, tokens or requests) by request key."""

    _amounts: dict[int, int] = field(default_factory=dict)
    _acknowledged: set[int] = field(default_factory=set)
    _in_report: dict[int, int] = field(default_factory=dict)
    total: int = 0  # charged, and not in the latest report
    credit: int = 0  # in the latest report, and discharged since

    def charge(self, key: int, amount: int) -> None:
        """Count `amount` for `key`; a second charge for the same key replaces the first."""
        self.discharge(key)
        self._amounts[key] = amount
        self.total += amount

    def acknowledge(self, key: int) -> None:
        """The worker has taken `key` on: its next report will show it. Unknown keys are ignored."""
        if key in self._amounts:
            self._acknowledged.add(key)

    def discharge(self, key: int) -> None:
        """`key` is not there any more. Idempotent."""
        self.total -= self._amounts.pop(key, 0)
        self._acknowledged.discard(key)
        self.credit += self._in_report.pop(key, 0)

    def reported(self) -> None:
        """A report arrived: what was acknowledged before is in its numbers now."""
        for key in self._acknowledged:
            amount = self._in_report[key] = self._amounts.pop(key)
            self.total -= amount
        self._acknowledged.clear()
        self.credit = 0

    def clear(self) -> None:
        """A new incarnation of the worker holds nothing of ours."""
        self._amounts.clear()
        self._acknowledged.clear()
        self._in_report.clear()
        self.total = self.credit = 0

    def check_integrity(self) -> None:
        """Assert that the total is the sum, and that no key is counted twice."""
        assert self.total == sum(self._amounts.values())
        assert self._acknowledged <= self._amounts.keys()
        assert not self._amounts.keys() & self._in_report.keys()
        assert self.credit >= 0

    @property
    def is_empty(self) -> bool:
        """Whether every charge was discharged."""
        return not self._amounts and not self._in_report


@dataclass(frozen=True)
class WorkerLedgers:
    """All three of one worker: KV blocks and requests (decode), prompt tokens (both roles)."""

    blocks: Ledger = field(default_factory=Ledger)
    requests: Ledger = field(default_factory=Ledger)
    tokens: Ledger = field(default_factory=Ledger)

    def all(self) -> tuple[Ledger, Ledger, Ledger]:
        return (self.blocks, self.requests, self.tokens)

    def discharge(self, key: int) -> None:
        for ledger in self.all():
            ledger.discharge(key)

    def reported(self) -> None:
        for ledger in self.all():
            ledger.reported()

    def clear(self) -> None:
        for ledger in self.all():
            ledger.clear()
