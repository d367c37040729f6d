"""When waiting requests may join the running batch, and what that costs in idle slots. Pure.

Continuous batching has no membership: anyone may join in any step, and a slot is free as soon as
its request ends. A static or dynamic batch is a group: it is formed when nothing runs any more, and
every slot of it stays taken until the last member ends. A member that was preempted is still one.
"""

from __future__ import annotations

from tasuki.scheduler.config import Batching, SchedulerConfig
from tasuki.scheduler.waiting_queue import WaitingQueue


class Membership:
    """`reserved_slot_steps` and `useful_slot_steps` count, over all steps, the slots that were
    taken and those in which something was computed.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._batching = config.batching
        self._window = config.batch_window
        self._most = config.max_running
        self._group = 0  # members admitted so far
        self._expected = 0  # members that are still to be admitted
        self.reserved_slot_steps = 0
        self.useful_slot_steps = 0

    def seats(self, waiting: WaitingQueue, running: int, now: float) -> int:
        """How many requests may join in this step, resuming ones not counted."""
        if self._batching is Batching.CONTINUOUS:
            return self._most
        if not running and not waiting.num_resuming:
            self._form(waiting, now)
        return self._expected

    def _form(self, waiting: WaitingQueue, now: float) -> None:
        self._group = self._expected = 0
        size = min(len(waiting), self._most)
        if self._batching is Batching.DYNAMIC and size < self._most:
            oldest = min((request.queued for request in waiting), default=now)
            if now - oldest < self._window:
                return
        self._expected = size

    def joined(self) -> None:
        """A request took one of the seats."""
        if self._batching is not Batching.CONTINUOUS:
            self._group += 1
            self._expected -= 1

    def close(self) -> None:
        """No memory for the next one: the group starts with those it has."""
        self._expected = 0

    def count(self, running: int, scheduled: int) -> None:
        """Account for one step."""
        continuous = self._batching is Batching.CONTINUOUS
        self.reserved_slot_steps += running if continuous else max(self._group, running)
        self.useful_slot_steps += scheduled
