"""What a step's time goes to, from one profiled run. Knows our operators by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

LINEAR = (
    "tasuki::linear", "mkldnn::_linear_pointwise", "aten::addmm", "aten::mm", "aten::linear",
)  # fmt: skip
ATTENTION = ("tasuki::attention", "aten::bmm")


@dataclass(frozen=True)
class Shares:
    """Of the CPU time of all operators."""

    linears: float
    attention: float

    def __str__(self) -> str:
        rest = 1 - self.linears - self.attention
        return f"{self.linears:.0%} / {self.attention:.0%} / {rest:.0%}"


def shares_of(work: Callable[[], object]) -> Shares:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        work()
    times = {event.key: event.self_cpu_time_total for event in recorded.key_averages()}
    total = sum(times.values())
    linears = sum(times.get(name, 0.0) for name in LINEAR)
    attention = sum(times.get(name, 0.0) for name in ATTENTION)
    return Shares(linears / total, attention / total)
