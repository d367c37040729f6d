"""Signals, the lifeline and the ready line. The end of a whole process is tested in test_worker."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading

import pytest

from tasuki.config import WorkerConfig
from tasuki.server.lifecycle import (
    FORCED_EXIT,
    Lifecycle,
    ReadyLine,
    StopCause,
    configure_logging,
    log_effective,
    write_ready_line,
)
from tests.waiting import until

LINE = ReadyLine("decode", "w1", "127.0.0.1:1", "127.0.0.1:2", 3, 4)


async def test_first_signal_drains_second_exits() -> None:
    exits: list[int] = []
    with Lifecycle(exit_now=exits.append) as lifecycle:
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            assert await lifecycle.wait_stop() is StopCause.DRAIN
        assert exits == []
        os.kill(os.getpid(), signal.SIGINT)
        await until(lambda: exits, "a second signal exits")
    assert exits == [FORCED_EXIT]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_the_end_of_the_lifeline_stops_now() -> None:
    mine, parents = os.pipe()
    exits: list[int] = []
    with Lifecycle(lifeline_fd=mine, lifeline_grace=30, exit_now=exits.append) as lifecycle:
        os.write(parents, b"still here")
        os.close(parents)
        async with asyncio.timeout(5):
            assert await lifecycle.wait_stop() is StopCause.NOW
    assert exits == []
    assert not [t for t in threading.enumerate() if "lifeline" in t.name]


async def test_a_busy_loop_cannot_outlive_its_lifeline() -> None:
    mine, parents = os.pipe()
    exited = threading.Event()
    with Lifecycle(lifeline_fd=mine, lifeline_grace=0.01, exit_now=lambda code: exited.set()):
        os.close(parents)
        assert exited.wait(5)  # blocks the event loop, which is the point


async def test_a_living_parent_keeps_it_running() -> None:
    mine, parents = os.pipe()
    with Lifecycle(lifeline_fd=mine) as lifecycle:
        lifecycle.request_stop(StopCause.FAILURE)
        lifecycle.request_stop(StopCause.DRAIN)
        assert await lifecycle.wait_stop() is StopCause.FAILURE  # the first cause stands
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(mine)
    os.close(parents)


def test_the_ready_line_is_one_line_of_json_and_closes_its_descriptor() -> None:
    reading, writing = os.pipe()
    write_ready_line(writing, LINE)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    assert text.endswith("\n")
    assert json.loads(text) == {
        "role": "decode",
        "worker_id": "w1",
        "address": "127.0.0.1:1",
        "metrics": "127.0.0.1:2",
        "pid": 3,
        "engine_pid": 4,
    }


def test_without_a_descriptor_it_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    write_ready_line(-1, LINE)
    assert json.loads(capsys.readouterr().out)["role"] == "decode"


def test_logs_go_to_stderr_with_the_settings_on_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        configure_logging("decode")
        log_effective(WorkerConfig(model="some/dir"))
        out, err = capsys.readouterr()
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    assert out == ""
    (line,) = err.splitlines()
    assert f"decode[{os.getpid()}]" in line
    assert '"model": "some/dir"' in line
