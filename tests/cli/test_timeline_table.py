"""The table of where the time went: what it says, and that its column adds up."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.timeline_table import TTFT_PARTS, render
from tasuki.client import GenerateOutput, Placement, Timings, Usage
from tasuki.messages import FinishReason
from tests.cli.fake_router import PLACEMENT, TIMINGS


def last(
    timings: dict[str, Any] | None = None,
    usage: dict[str, Any] | None = None,
    placement: dict[str, Any] | None = None,
) -> GenerateOutput:
    counts = {"prompt_tokens": 90, "completion_tokens": 3, "cached_tokens": 0}
    return GenerateOutput(
        token_ids=(),
        text="",
        index=3,
        finish_reason=FinishReason.LENGTH,
        usage=Usage(**(counts | (usage or {}))),
        timings=Timings(**(TIMINGS | (timings or {}))),
        placement=Placement(**(PLACEMENT | (placement or {}))),
    )


def column(text: str) -> list[float]:
    """The milliseconds of the first part of the table: the total, then its parts."""
    lines = text.splitlines()[: 1 + len(TTFT_PARTS)]
    return [float(match) for line in lines for match in re.findall(r"(-?\d+\.\d\d) ms", line)]


def test_what_it_says() -> None:
    assert render(last()).splitlines() == [
        "time to first token          123.46 ms",
        "  router queue                 0.10 ms   0.1 %",
        "  reservation wait             0.20 ms   0.2 %",
        "  prefill queue                1.00 ms   0.8 %",
        "  prefill compute            120.00 ms  97.2 %",
        "  lost on a fallback           0.00 ms   0.0 %",
        "  hops between processes       2.16 ms   1.7 %",
        "then to the second token      20.00 ms",
        "  exposed transfer             1.50 ms",
        "  commit wait                  0.50 ms",
        "  first decode step           18.00 ms",
        "KV transfer                    4.00 ms  2.00 MB in 6 blocks, 0.50 GB/s",
        "time per output token         20.00 ms  50.0 tokens/s after the first",
        "whole request                163.46 ms",
        "tokens: 90 in, 3 out, ended by length",
        "objective: met",
        "placement: split (prefill_available), prefill-0 -> decode-0",
    ]


part = st.floats(0, 50, allow_nan=False)


@given(st.lists(part, min_size=5, max_size=5), st.floats(0, 2))
def test_the_column_adds_up_however_it_is_rounded(parts: list[float], hop: float) -> None:
    names = [name for name, _ in TTFT_PARTS if name != "hop"]
    timings = dict(zip(names, parts, strict=True)) | {"hop": hop, "ttft": sum(parts) + hop}
    total, *shown = column(render(last(timings)))
    assert round(total * 100) == sum(round(value * 100) for value in shown)


def test_a_local_request_has_no_transfer_line() -> None:
    timings = {"transfer": 0.0, "transfer_bytes": 0, "transfer_blocks": 0}
    placement = {"kind": "local", "reason": "short_prompt", "prefill_worker_id": ""}
    text = render(last(timings, placement=placement))
    assert "KV transfer" not in text
    assert "placement: local (short_prompt), decode-0" in text


def test_a_fallback_says_what_it_cost() -> None:
    placement = {"fallback_reason": "prefill_died", "decode_computed_prompt_tokens": 17}
    text = render(last(placement=placement))
    assert "fallback: prefill_died; the decode worker computed 17 prompt tokens itself" in text


def test_one_token_has_no_second_one() -> None:
    text = render(last({"tpot": 0.0}, {"completion_tokens": 1}))
    assert "second token" not in text
    assert "per output token" not in text


def test_cached_tokens_are_named() -> None:
    assert "90 in (16 cached), 3 out" in render(last(usage={"cached_tokens": 16}))


@pytest.mark.parametrize(("reason", "shown"), [("\n\n", r"('\n\n')"), (7, "(token 7)")])
def test_the_stop_is_named(reason: str | int, shown: str) -> None:
    stopped = dataclasses.replace(last(), finish_reason=FinishReason.STOP, stop_reason=reason)
    assert f"3 out, ended by stop {shown}" in render(stopped)


def test_an_instant_answer_does_not_divide_by_zero() -> None:
    zeros = {field.name: 0 for field in dataclasses.fields(Timings) if field.name != "slo_result"}
    assert "0.00 ms" in render(last(zeros))


def test_a_cluster_that_sends_none_of_it() -> None:
    assert "no timeline" in render(GenerateOutput(token_ids=(1,), text="a", index=0))
