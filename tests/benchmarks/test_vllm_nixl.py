"""The comparison with vLLM's connector, in its parts that need no peer."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import nixl_peer
from benchmarks.handed_over import HandedOver, handed_over
from benchmarks.nixl_peer import PeerError, Transfers, check, environment, streamed
from benchmarks.nixl_server import PROGRESS_DELAY
from benchmarks.vllm_nixl import (
    CHUNKED,
    CORRECTED,
    PROMPT_TOKENS,
    SHIPPED,
    WHOLE,
    VllmNixlResult,
    prompts,
    report,
    result,
)

METRICS = """# HELP vllm:nixl_xfer_time_seconds Histogram of transfer duration.
# TYPE vllm:nixl_xfer_time_seconds histogram
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="0.05",model_name="demo"} 2.0
vllm:nixl_xfer_time_seconds_count{engine="0",model_name="demo"} 3.0
vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="demo"} 0.15
vllm:nixl_post_time_seconds_sum{engine="0",model_name="demo"} 7.0
vllm:nixl_bytes_transferred_count{engine="0",model_name="demo"} 3.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="demo"} 1.2e+08
"""


def test_a_request_is_what_the_sums_grew_by() -> None:
    before = Transfers.parse(METRICS)
    assert before == Transfers(3, 0.15, 120_000_000)
    later = METRICS.replace("} 3.0", "} 4.0").replace("0.15", "0.2").replace("1.2e+08", "1.6e+08")
    grown = Transfers.parse(later).since(before)
    assert (grown.count, grown.nbytes) == (1, 40_000_000)
    assert grown.seconds == pytest.approx(0.05)


def test_no_transfer_yet_is_none() -> None:
    assert Transfers.parse("python_info 1.0\n") == Transfers(0, 0.0, 0)


def test_tokens_come_out_of_an_event_stream_in_order() -> None:
    events = [{"choices": [{"token_ids": [5, 6]}]}, {"choices": [{"text": "", "token_ids": None}]}]
    lines = [b"data: " + json.dumps(event).encode() + b"\n" for event in events]
    found = list(streamed(iter([*lines, b"\n", b"data: [DONE]\n"])))
    assert [token for _, token in found] == [5, 6]


def test_a_decode_step_is_not_counted_as_waiting() -> None:
    one = handed_over(1000, 0.02, 10.0, [(10.08, 1), (10.11, 2), (10.14, 3), (10.27, 4)])
    assert one.step == pytest.approx(0.03)
    assert one.exposed == pytest.approx(0.05)
    assert one.speed == pytest.approx(50_000)
    assert one.token_ids == (1, 2, 3, 4)


def test_prompts_are_the_same_for_both_sides_and_never_twice() -> None:
    assert prompts(0, 3) == prompts(0, 3)
    every = [tuple(prompt) for number in (0, 1) for prompt in prompts(number, 3)]
    assert len(set(every)) == 6
    assert {len(prompt) for prompt in every} == {PROMPT_TOKENS}


def test_a_peer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="cannot be run"):
        check(tmp_path / "python")
    with pytest.raises(PeerError, match="has no vllm"):
        check(Path(sys.executable))


def test_the_command_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.parse(["vllm_nixl"])
    assert ended.value.code == 2
    assert "needs --peer-python" in capsys.readouterr().err
    assert command.main(["vllm_nixl", "--peer-python", str(tmp_path / "python")]) == 1
    assert "cannot be run" in capsys.readouterr().err


def test_only_who_is_put_right_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "ours")
    shipped = environment(1, 5600, corrected=False)
    assert environment(1, 5600, corrected=True) == shipped | {PROGRESS_DELAY: "1000"}
    assert shipped["UCX_TLS"] == "tcp,self"
    assert "PYTHONPATH" not in shipped


def test_the_command_line_says_which_role_a_server_has() -> None:
    said = json.loads(nixl_peer.connector("producer"))
    assert said["kv_role"] == "kv_producer"


def made_up() -> VllmNixlResult:
    def handed(transfer: float, exposed: float, last: int) -> list[HandedOver]:
        return [
            HandedOver(40_000_000, transfer * factor, exposed, 0.02, (7, last)) for factor in (1, 2)
        ]

    found = {
        SHIPPED: handed(0.08, 0.3, 8),
        WHOLE: handed(0.01, 0.02, 8),
        CORRECTED: [handed(0.04, 0.05, 8)[0], handed(0.04, 0.05, 9)[1]],
        CHUNKED: handed(0.02, 0.01, 8),
    }
    return result(found, {name: [0.5] for name in found}, 2)


def test_ratios_say_how_many_times_longer_theirs_took() -> None:
    found = made_up()
    by_pair = {(one.theirs, one.ours): one for one in found.ratios}
    fair = by_pair[CORRECTED, WHOLE]
    assert fair.transfer.median == pytest.approx(4.0)
    assert fair.exposed == pytest.approx(2.5)
    assert by_pair[SHIPPED, WHOLE].transfer.median == pytest.approx(8.0)
    assert (found.same_tokens, found.prompts) == (1, 2)
    json.dumps(asdict(found))


def test_the_report_has_a_row_for_each_side_and_each_ratio() -> None:
    text = report(made_up())
    assert f"| {WHOLE} | 40.0 MB | 15.00 (10.00 to 20.00) | 3.00 |" in text
    assert f"| {CORRECTED} / {WHOLE} | 4.00 (4.00 to 4.00) | 2.50 |" in text
    assert "1 of them continued with the same 9 tokens by both" in text
