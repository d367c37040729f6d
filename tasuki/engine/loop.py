"""The two threads of an engine process and the one lock between them.

The control thread reads the server's messages and runs the role's core; the step thread
schedules, runs the forward and hands the result to the core. The lock is held for both, never
during a forward, so that a cancel, a first token or a link message never waits for one.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from tasuki.clock import Clock, monotonic
from tasuki.engine.core import Host, WorkerCore
from tasuki.engine.engine import Engine
from tasuki.engine.fault_injection import inject
from tasuki.engine.profile import Profiling
from tasuki.engine.transport import Transport
from tasuki.errors import Code, EngineDiedError, TasukiError
from tasuki.messages import (
    CaptureProfile,
    EngineFailed,
    ErrorStatus,
    FaultInjected,
    InjectFault,
    LoadReport,
    PrefixCacheReset,
    ResetPrefixCache,
    Shutdown,
    ToEngine,
)
from tasuki.scheduler.output import SchedulerOutput

TICK_SECONDS = 0.05
REPORT_SECONDS = 0.1
SILENT_REPORT_SECONDS = 1.0
log = logging.getLogger(__name__)


class EngineLoop:
    def __init__(
        self,
        engine: Engine,
        transport: Transport,
        make_core: Callable[[Host], WorkerCore],
        clock: Clock = monotonic,
        *,
        step_timeout: float = 60.0,
    ) -> None:
        """An engine whose step takes longer than `step_timeout` seconds ends itself."""
        self.engine = engine
        self._transport = transport
        self._clock = clock
        self._step_timeout = step_timeout
        self._changed = threading.Condition()  # its lock is the one lock
        self._stopping = False
        self._failure: BaseException | None = None
        self._calls: deque[Callable[[], None]] = deque()
        self._host = Host(transport.send, self._call_soon, clock)
        self._last_report: tuple[float, LoadReport] | None = None
        self._leaked = 0
        self._profiles: deque[Profiling] = deque()  # under the lock; the first one records
        self.core = make_core(self._host)

    def run(self) -> int:
        """Serve until Shutdown or the end of the server; returns an exit code."""
        stepper = threading.Thread(target=self._step_forever, name="tasuki-step", daemon=True)
        stepper.start()
        try:
            self._control_forever()
        except Exception as error:
            log.exception("the control thread failed")
            self._failure = error
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if not self._host.pulse.age(self._clock()) > self._step_timeout:
            stepper.join(timeout=self._step_timeout)  # at most one forward
        return self._finish()

    # --- control thread -------------------------------------------------------------------------

    def _control_forever(self) -> None:
        while not self._stopping:
            messages = self._transport.wait(TICK_SECONDS)
            if messages is None:
                log.info("the server process is gone")
                return
            with self._changed:
                self._act(messages)

    def _act(self, messages: list[ToEngine]) -> None:
        while self._calls:
            self._calls.popleft()()
        for message in messages:
            self._handle(message)
        now = self._clock()
        self._require_a_step_to_end(now)
        self.core.tick(now)
        self._report(now)
        self._host.flush()
        if self.engine.has_work:
            self._changed.notify_all()

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Shutdown():
                self._stopping = True
            case ResetPrefixCache():
                blocks = self.engine.blocks.reset_prefix_cache()
                done = PrefixCacheReset(command_id=message.command_id, blocks=blocks)
                self._host.deliver(done)
            case InjectFault():
                done_it = inject(self.core.connector, message)
                self._host.deliver(FaultInjected(command_id=message.command_id, injected=done_it))
            case CaptureProfile():
                self._profiles.append(Profiling(message, self._clock()))
            case _:
                self.core.handle(message, self._clock())

    def _require_a_step_to_end(self, now: float) -> None:
        age = self._host.pulse.age(now)
        if age > self._step_timeout:
            raise EngineDiedError(
                f"a step has run for {age:.1f} s (--step-timeout {self._step_timeout:g}): the "
                "engine is stuck and ends itself"
            )

    def _call_soon(self, fn: Callable[[], None]) -> None:
        self._calls.append(fn)
        self._transport.wake()

    def _report(self, now: float) -> None:
        """A load report when something changed, and one a second anyway."""
        since = now - self._last_report[0] if self._last_report else SILENT_REPORT_SECONDS
        if since < REPORT_SECONDS:
            return
        report = self.core.report(now)
        changed = self._last_report is None or report != self._last_report[1]
        if changed or since >= SILENT_REPORT_SECONDS:
            self._last_report = (now, report)
            self._host.deliver(report)
        self._record_levels()

    def _record_levels(self) -> None:
        metrics, scheduler = self._host.metrics, self.engine.scheduler
        for state, count in self.engine.blocks.pool.counts().items():
            metrics.level("kv_blocks", count, state=state)
        metrics.level("running_requests", len(scheduler.running))
        metrics.total("preemptions_total", scheduler.preemptions)
        slots = scheduler.membership
        metrics.total("slot_steps_total", slots.reserved_slot_steps, kind="reserved")
        metrics.total("slot_steps_total", slots.useful_slot_steps, kind="useful")
        metrics.total("prefix_cache_queries_total", scheduler.prefix_queries)
        metrics.total("prefix_cache_hits_total", scheduler.prefix_hits)
        if self.core.is_idle and not scheduler.has_work:
            self._count_leaks()

    def _count_leaks(self) -> None:
        """With no work left, every held block must have an owner: a link, or a live stream."""
        if self.engine.blocks.num_free == self.engine.blocks.pool.num_blocks:
            return
        live = (*self.engine.scheduler.live_keys(), *self.core.live_keys())
        leaked = len(self.engine.blocks.leaked(live))
        if leaked > self._leaked:
            log.error("%d KV blocks have leaked", leaked - self._leaked)
            self._host.metrics.add("kv_block_leaks_total", leaked - self._leaked)
            self._leaked = leaked

    # --- step thread ------------------------------------------------------------------------------

    def _step_forever(self) -> None:
        try:
            while not self._stopping:
                plan = self._next_plan()
                if plan is not None:
                    self._step(plan)
                self._end_profile()
        except Exception as error:
            log.exception("a step failed")
            self._failure = error
            self._stopping = True
            self._transport.wake()

    def _next_plan(self) -> SchedulerOutput | None:
        """A plan with something to compute; None, after a while, when there is nothing."""
        with self._changed:
            if self.engine.has_work:
                plan = self.engine.schedule()
                if plan.requests:
                    return plan
                self.engine.update(plan, self.engine.execute(plan))  # nothing fits now
            self._changed.wait(TICK_SECONDS)
            return None

    def _step(self, plan: SchedulerOutput) -> None:
        profiling = self._profiles[0] if self._profiles else None
        if profiling is not None:
            profiling.begin_step()
        begin = self._clock()
        pulse = self._host.pulse
        pulse.steps, pulse.began = pulse.steps + 1, begin
        result = self.engine.execute(plan)
        pulse.began = None
        if profiling is not None:
            profiling.end_step()
        with self._changed:
            now = self._clock()
            self.engine.measure(plan, now - begin)
            updates = self.engine.update(plan, result)
            self.core.advance(updates, now)
            self._host.metrics.observe("step_seconds", now - begin, kind=step_kind(plan))
            self._host.metrics.observe("batch_tokens", plan.num_tokens)
            self._host.flush()

    def _end_profile(self) -> None:
        """Deliver a recording that is over; the next one, if any, begins with the next step."""
        with self._changed:
            over = self._profiles and self._profiles[0].is_over(self._clock())
        if over:
            result = self._profiles[0].finish()  # takes a while: not under the lock
            with self._changed:
                self._profiles.popleft()
                self._host.deliver(result)

    # --- the end --------------------------------------------------------------------------------

    def _finish(self) -> int:
        if self._failure is not None:
            self._transport.send(EngineFailed(error=status_of(self._failure)))
        try:
            with self._changed:
                self.core.close()
                self._host.flush()
        except TasukiError as error:
            log.error("links could not be fenced: %s", error)
            self._failure = error
        self._transport.close()
        return 1 if self._failure is not None else 0


def step_kind(plan: SchedulerOutput) -> str:
    """What a step did: only prompt chunks, only single tokens, or both."""
    chunks = sum(len(request.token_ids) > 1 for request in plan.requests)
    if not chunks:
        return "decode"
    return "prefill" if chunks == len(plan.requests) else "mixed"


def status_of(error: BaseException) -> ErrorStatus:
    """An exception as data for the other side of a socket."""
    if isinstance(error, TasukiError):
        return ErrorStatus(code=error.code, reason=error.reason, message=error.message)
    return ErrorStatus(code=Code.INTERNAL, reason="internal", message=f"{error!r}")
