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

    def add(self, request: Request, count: int, table: Sequence[int], now: float) -> None:
        """Schedule the next `count` tokens of a request whose blocks, `table`, cover them."""
        if request.first_scheduled is None:
            request.first_scheduled = now
        start, output = request.num_computed_tokens, request.output_token_ids
        left = len(request.prompt_token_ids) + len(output) - start
        single = left == 1 and output  # the last output token, as in almost every plan
        self.budget -= count
        self.scheduled[request.key] = ScheduledRequest(
            request.key,
            start,
            [output[-1]] if single else request.tokens(start, count),
            table,
            count == left,
            1 if single else request.logits_wanted(start, count),
            request.sampling,
            request.prompt_token_ids,
            output,
            request.eos_token_ids,
            request.sample_index,
            1 if single else request.num_choices,
        )

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
