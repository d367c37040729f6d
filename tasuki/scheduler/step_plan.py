"""One step while it is being planned: what is scheduled so far, what is left of the budget, and who
gives way next.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasuki.request import Request
from tasuki.scheduler.config import QueueOrder, SchedulerConfig
from tasuki.scheduler.output import ScheduledRequest


class StepPlan:
    def __init__(self, config: SchedulerConfig) -> None:
        self.budget = config.max_num_batched_tokens
        self.threshold = config.long_prefill_token_threshold or self.budget
        self.preempted = False
        self.scheduled: dict[int, ScheduledRequest] = {}
        self._by_priority = config.queue_order is QueueOrder.PRIORITY
        self._victims: list[Request] | None = None  # who runs, the first to give way last

    def add(self, entry: ScheduledRequest, count: int) -> None:
        self.scheduled[entry.key] = entry
        self.budget -= count

    def next_victim(self, running: Sequence[Request]) -> Request:
        """The latest, or the latest of the least important; each one once."""
        if self._victims is None:
            self._victims = list(running)
            if self._by_priority:
                self._victims.sort(key=lambda request: request.priority)  # stable: latest last
        return self._victims.pop()

    def withdraw(self, key: int) -> None:
        """A request was preempted: what it was given in this step is there for others."""
        entry = self.scheduled.pop(key, None)
        if entry is not None:
            self.budget += len(entry.token_ids)
