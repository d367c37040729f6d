"""Records what the operators of some steps cost. Knows nothing about what a step is for.

Used on the step thread only: torch's profiler must start and stop where the work is done.
"""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

from torch.autograd import profiler_util
from torch.profiler import ProfilerActivity, profile

from tasuki.messages import CaptureProfile, ProfileCaptured

ROWS = 40
MAX_TRACE_BYTES = 3 << 20


class Profiling:
    """One recording from its first step to its result."""

    def __init__(self, command: CaptureProfile, now: float) -> None:
        self._command = command
        self._deadline = now + command.seconds
        self._profile: profile | None = None
        self._steps = 0

    def begin_step(self) -> None:
        """Call before each step."""
        if self._profile is None:
            self._profile = profile(activities=[ProfilerActivity.CPU], acc_events=True)
            self._profile.start()

    def end_step(self) -> None:
        self._steps += 1

    def is_over(self, now: float) -> bool:
        return self._steps >= self._command.num_steps or now >= self._deadline

    def finish(self) -> ProfileCaptured:
        """Stop, and say what was recorded."""
        command_id, recorded = self._command.command_id, self._profile
        if recorded is None:
            return ProfileCaptured(command_id=command_id, steps=0, table="", trace=b"")
        recorded.stop()
        events: profiler_util.EventList = recorded.key_averages()
        # torch does not annotate `table`
        table = events.table(sort_by="self_cpu_time_total", row_limit=ROWS)  # type: ignore[no-untyped-call]
        return ProfileCaptured(
            command_id=command_id, steps=self._steps, table=str(table), trace=_trace(recorded)
        )


def _trace(recorded: profile) -> bytes:
    with tempfile.TemporaryDirectory(prefix="tasuki-profile-") as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        packed = gzip.compress(file.read_bytes(), compresslevel=6)
    return packed if len(packed) <= MAX_TRACE_BYTES else b""
