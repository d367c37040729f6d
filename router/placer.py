"""Joins the admission queue to the registry: gives each waiting request a placement, in order.

Knows nothing about tokens or streams. Runs on one event loop and acts when a request joins or
leaves, when a charge is released, when a deadline passes, and when its owner calls `pump` because
the registry changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import dataclass, replace

from router.admission import AdmissionQueue, Entry
from router.charge import Charge
from router.placement import Placement, PlacementPolicy, PlacementRequest, Rejection, place
from router.workers.registry import Registry
from router.workers.watched_worker import WatchedWorker
from tasuki.clock import Clock
from tasuki.errors import (
    DeadlineError,
    NoKVError,
    RequestTooLongError,
    TasukiError,
    UnavailableError,
)
from tasuki.reasons import RejectionReason


@dataclass(eq=False)
class Applicant:
    """One request that waits, with the future that its placement resolves."""

    request: PlacementRequest
    own_deadline: float
    answer: asyncio.Future[tuple[Placement, Charge]]


@dataclass(frozen=True)
class Placed:
    """A placement with what is charged for it. Give it back with `Placer.release`."""

    placement: Placement
    charge: Charge
    entry: Entry[Applicant]


class Placer:
    """`queue_timeout` is in seconds; deadlines are on `clock`."""

    def __init__(
        self,
        registry: Registry,
        policy: PlacementPolicy,
        *,
        max_queue: int,
        queue_timeout: float,
        clock: Clock,
    ) -> None:
        self.queue: AdmissionQueue[Applicant] = AdmissionQueue(max_queue)
        self._registry = registry
        self._policy = policy
        self._queue_timeout = queue_timeout
        self._clock = clock
        self._keys = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    async def place(self, request: PlacementRequest, deadline: float) -> Placed:
        """Wait for a placement, at most until `deadline` or the queue's own timeout.

        Raises QueueFullError, RequestTooLongError, UnavailableError, NoKVError or DeadlineError.
        """
        now = self._clock()
        applicant = Applicant(request, deadline, asyncio.get_running_loop().create_future())
        limit = min(deadline, now + self._queue_timeout)
        return await self._await_answer(self.queue.offer(applicant, now=now, deadline=limit))

    async def place_again(self, refused: Placed) -> Placed:
        """After a decode worker refused before any token: place elsewhere, or here after a report.

        The request goes to the head of the queue and keeps its first deadline.
        """
        worker = refused.charge.decode
        self.release(refused)
        old = refused.entry.item
        request = replace(
            old.request, refused={**old.request.refused, worker.address: worker.reports}
        )
        answer = asyncio.get_running_loop().create_future()
        refused.entry.item = Applicant(request, old.own_deadline, answer)
        self.queue.offer_again(refused.entry)
        return await self._await_answer(refused.entry)

    async def place_after_loss(
        self, request: PlacementRequest, deadline: float, lost: WatchedWorker | None
    ) -> Placed:
        """Place a request that a worker, or a router, was serving: ahead of everything that waits,
        and with the patience to wait until a worker is back.
        """
        now = self._clock()
        refused = {} if lost is None else {lost.address: lost.reports}
        request = replace(request, patient=True, refused=refused)
        applicant = Applicant(request, deadline, asyncio.get_running_loop().create_future())
        limit = min(deadline, now + self._queue_timeout)
        entry = Entry(applicant, arrived=now, deadline=limit, waiting=False)
        self.queue.offer_again(entry)
        return await self._await_answer(entry)

    def release(self, placed: Placed) -> None:
        """Return the charges: the request is no longer on its workers. Idempotent."""
        placed.charge.release()
        self.pump()

    def pump(self) -> None:
        """Place or refuse from the head on, until one has to wait."""
        now = self._clock()
        for entry in self.queue.expire(now):
            self._refuse(entry, self._expiry_error(entry, now))
        while (head := self.queue.head()) is not None:
            decision = place(head.item.request, self._registry.snapshots(), self._policy)
            if decision is None:
                break
            self.queue.take()
            if isinstance(decision, Rejection):
                self._refuse(head, rejection_error(decision, head.item.request))
            elif not head.item.answer.done():
                head.item.answer.set_result((decision, self._charge(decision, head.item.request)))
        self._set_timer(now)

    async def _await_answer(self, entry: Entry[Applicant]) -> Placed:
        self.pump()
        answer = entry.item.answer
        try:
            placement, charge = await answer
        except asyncio.CancelledError:
            # the caller went away, perhaps in the very moment in which its placement was made
            self.queue.withdraw(entry)
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                answer.result()[1].release()
            self.pump()
            raise
        return Placed(placement, charge, entry)

    def _charge(self, placement: Placement, request: PlacementRequest) -> Charge:
        return Charge(next(self._keys), self._registry, placement, request)

    def _refuse(self, entry: Entry[Applicant], error: TasukiError) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):  # cancelled: nobody listens
            entry.item.answer.set_exception(error)

    def _expiry_error(self, entry: Entry[Applicant], now: float) -> TasukiError:
        waited = now - entry.arrived
        if entry.item.own_deadline <= now:
            return DeadlineError(
                f"the request's deadline passed after {waited:.3f} s in the admission queue"
            )
        if entry.item.request.patient:
            return UnavailableError(
                f"no decode worker could take the request over within {waited:.1f} s "
                "(--queue-timeout); send it again"
            )
        return NoKVError(
            f"no decode worker had {entry.item.request.prompt_len + 1} positions of KV free within "
            f"{waited:.1f} s (--queue-timeout); try again later"
        )

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.queue.next_deadline()
        if deadline is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(deadline - now, 0.0) + 0.001, self.pump)


def rejection_error(rejection: Rejection, request: PlacementRequest) -> TasukiError:
    """The error a client reads for a rejection."""
    if rejection.reason is RejectionReason.TOO_LONG:
        return RequestTooLongError(
            f"{request.prompt_len} prompt tokens and {request.max_tokens} output tokens fit no "
            "decode worker of this cluster; shorten the prompt or lower max_tokens"
        )
    if rejection.reason is RejectionReason.DRAINING:
        return UnavailableError(
            "every decode worker is going away; try again later", reason=rejection.reason
        )
    return UnavailableError(
        "no decode worker is ready; try again later, and look at the router's worker list if it "
        "stays so",
        reason=rejection.reason,
    )
