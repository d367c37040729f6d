"""The router's event line: gaps, latencies, and TTFT taken apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.messages import FirstTokenParts
from tasuki.timeline import Timeline


def test_gaps_of_tokens_that_share_a_message() -> None:
    line = Timeline(arrived=10.0)
    assert line.tokens_left(11.0, 3) == [0.0, 0.0]  # the first token has no gap
    assert line.tokens_left(11.5, 2) == [0.5, 0.0]
    assert line.tokens_left(12.5, 1) == [1.0]
    assert line.tokens_left(13.0, 0) == []
    assert (line.ttft, line.e2e, line.num_tokens) == (1.0, 2.5, 6)
    assert line.tpot == pytest.approx(1.5 / 5)


def test_every_token_but_the_first_has_one_gap_and_gaps_add_up() -> None:
    line = Timeline(arrived=0.0)
    gaps = [gap for now, n in ((1.0, 2), (1.25, 4), (2.0, 1)) for gap in line.tokens_left(now, n)]
    assert len(gaps) == line.num_tokens - 1
    assert sum(gaps) == pytest.approx(1.0)


def test_a_request_is_as_fast_as_its_slowest_sample() -> None:
    line = Timeline(arrived=0.0)
    assert line.tokens_left(1.0, 1, 0) == line.tokens_left(1.1, 1, 2) == []  # both are first
    assert line.tokens_left(1.5, 1, 0) == [0.5]
    assert line.tokens_left(3.1, 2, 2) == [2.0, 0.0]
    assert (line.ttft, line.tpot, line.e2e, line.num_tokens) == (1.0, 1.0, 3.1, 5)


def test_nothing_is_known_before_it_happened() -> None:
    line = Timeline(arrived=5.0)
    assert (line.ttft, line.tpot, line.e2e, line.queue, line.parts()) == (None,) * 5
    line.tokens_left(6.0, 1)
    assert line.tpot is None  # one token has no time per output token


seconds = st.floats(min_value=0, max_value=100, allow_nan=False)


@given(*[seconds] * 7)
def test_parts_add_up_to_ttft(
    arrived: float, queue: float, rest: float, a: float, b: float, c: float, d: float
) -> None:
    line = Timeline(arrived=arrived, placed=arrived + queue)
    line.worker_parts = FirstTokenParts(
        reservation=a, prefill_queue=b, prefill_compute=c, fallback=d
    )
    line.tokens_left(arrived + queue + rest, 1)
    parts = line.parts()
    assert parts is not None
    assert line.ttft == pytest.approx(sum(parts.as_dict().values()), abs=1e-9)
    assert parts.ttft == pytest.approx(line.ttft, abs=1e-9)
    claimed = a + b + c + d
    assert parts.hop == pytest.approx(rest - claimed, abs=1e-6)
    if abs(rest - claimed) > 1e-5:
        assert parts.residual_is_negative == (claimed > rest)


def test_rounding_is_no_bug_but_a_millisecond_is() -> None:
    line = Timeline(arrived=0.0, placed=0.0)
    line.tokens_left(0.3, 1)
    line.worker_parts = FirstTokenParts(prefill_compute=0.1 + 0.2)
    parts = line.parts()
    assert parts is not None
    assert not parts.residual_is_negative
    line.worker_parts = FirstTokenParts(prefill_compute=0.301)
    parts = line.parts()
    assert parts is not None
    assert parts.residual_is_negative
    assert parts.hop == pytest.approx(-0.001)  # kept as it is, not clipped
