"""How one request is counted, and which part a miss is blamed on."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from router.recorder import Recorder, blamed_part
from tasuki.messages import FirstTokenParts
from tasuki.metrics import RouterMetrics
from tasuki.slo import Slo, SloResult
from tasuki.timeline import Timeline

SLO = Slo(ttft=1.0, tpot=0.1)


def line(ttft: float, tpot: float, **parts: float) -> Timeline:
    made = Timeline(arrived=0.0, placed=0.1)
    made.worker_parts = FirstTokenParts(**parts)
    made.tokens_left(ttft, 1)
    made.tokens_left(ttft + tpot, 1)
    return made


@pytest.mark.parametrize(
    ("ttft", "tpot", "result", "blamed"),
    [
        (0.5, 0.05, SloResult.MET, None),
        (3.0, 0.05, SloResult.TTFT_MISS, "prefill_queue"),
        (0.5, 0.5, SloResult.TPOT_MISS, "decode"),
        (3.0, 0.2, SloResult.BOTH_MISS, "prefill_queue"),
        (1.5, 0.9, SloResult.BOTH_MISS, "decode"),
    ],
)
def test_blame(ttft: float, tpot: float, result: SloResult, blamed: str | None) -> None:
    made = line(ttft, tpot, prefill_queue=ttft / 2, prefill_compute=ttft / 4)
    recorder = Recorder(RouterMetrics(CollectorRegistry()), "split")
    assert recorder.completed(made, SLO) is result
    assert blamed_part(result, SLO, made) == blamed


def test_words_of_other_processes_cannot_grow_the_label_set() -> None:
    registry = CollectorRegistry()
    recorder = Recorder(RouterMetrics(registry), "split")
    recorder.placed("local", "sunspots")
    recorder.fell_back("moonlight")
    recorder.rejected("comet")
    for name, labels in (
        ("placements_total", {"kind": "local", "reason": "unknown"}),
        ("fallbacks_total", {"reason": "unknown"}),
        ("rejections_total", {"reason": "unknown"}),
    ):
        assert registry.get_sample_value(f"tasuki_{name}", labels) == 1
