"""`tasuki up` as a process of its own, starting stand-ins: however it ends, all of it ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.programs import recorded, running, wait_until

ROOT = Path(__file__).resolve().parents[2]
READY_WITHIN = 30.0
# A server process and its engine for two workers, and the router.
EVERYONE = 5
WITH_ENGINES = ("prefill=engine", "decode=engine")


class Up:
    """One run of the command: its process, and the processes it started."""

    def __init__(self, command: list[str], folder: Path, env: dict[str, str]) -> None:
        self.pids_file = folder / "pids"
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"STANDIN_PIDS": str(self.pids_file)} | env,
            start_new_session=True,
        )

    def ready_line(self) -> dict[str, Any]:
        """The JSON line, which comes when everything is up."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"no ready line: {self.end()[2]}"
        ready: dict[str, Any] = json.loads(line)
        return ready

    def end(self) -> tuple[int, str, str]:
        """Exit code, the rest of stdout, stderr; waits with a deadline."""
        out, err = self.process.communicate(timeout=READY_WITHIN)
        return self.process.returncode, out.decode(), err.decode()

    def wait_gone(self, seconds: float) -> float:
        return wait_until(lambda: not running(recorded(self.pids_file)), "children end", seconds)


Start = Callable[..., Up]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "config.json").write_text("{}")
    started: list[Up] = []

    def start_up(*flags: str, habits: tuple[str, ...] = (), parent: str = "", **env: str) -> Up:
        arguments = [*habits, "--", "--port=0", f"--model={tmp_path}", *flags]
        command = [sys.executable, "-m", "tests.cli.run_up", *arguments]
        if parent:
            command = ["sh", "-c", parent.format(command=shlex.join(command))]
        started.append(Up(command, tmp_path, env))
        return started[-1]

    yield start_up
    for up in started:
        if up.process.poll() is None:
            os.killpg(up.process.pid, signal.SIGKILL)
        for stream in (up.process.stdout, up.process.stderr):
            if stream is not None:
                stream.close()
        up.process.wait(timeout=READY_WITHIN)


def test_json_is_one_line_with_everything_a_script_needs(start: Start) -> None:
    up = start("--json", habits=WITH_ENGINES)
    ready = up.ready_line()
    assert set(ready) == {"router", "http", "router_metrics", "workers"}
    assert ready["http"] is None
    fields = {"role", "worker_id", "address", "metrics", "pid", "engine_pid"}
    assert [set(worker) for worker in ready["workers"]] == [fields, fields]
    assert [worker["role"] for worker in ready["workers"]] == ["prefill", "decode"]
    pids = {worker[key] for worker in ready["workers"] for key in ("pid", "engine_pid")}
    assert pids < set(running(recorded(up.pids_file)))
    assert len(recorded(up.pids_file)) == EVERYONE

    up.process.send_signal(signal.SIGINT)
    code, out, _ = up.end()
    assert (code, out) == (0, "")
    assert running(recorded(up.pids_file)) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_closed_terminal_and_a_request_to_end(start: Start, number: signal.Signals) -> None:
    up = start("--json", "--colocated=2", habits=WITH_ENGINES)
    assert [worker["role"] for worker in up.ready_line()["workers"]] == ["decode", "decode"]
    up.process.send_signal(number)
    assert up.end()[0] == 0
    assert running(recorded(up.pids_file)) == []


def test_a_second_ctrl_c_does_not_wait_for_the_deaf(start: Start) -> None:
    up = start("--json", "--stop-timeout=600", habits=("prefill=deaf", "decode=deaf,engine"))
    up.ready_line()
    up.process.send_signal(signal.SIGINT)
    assert up.process.stderr is not None
    while b"Once more" not in up.process.stderr.readline():
        pass
    up.process.send_signal(signal.SIGINT)
    assert up.end()[0] == 130
    assert running(recorded(up.pids_file)) == []


def test_sigkill_leaves_nothing(start: Start) -> None:
    up = start("--json", habits=WITH_ENGINES)
    up.ready_line()
    up.process.kill()
    assert up.wait_gone(seconds=2.0) < 2.0
    assert len(recorded(up.pids_file)) == EVERYONE


def test_sigkill_of_the_parent_leaves_nothing(start: Start) -> None:
    # As the Makefile does: the shell stands for make, and does not exec, so that it can be killed.
    parent = "TASUKI_DIE_WITH_PARENT=$$ {command}; echo ended"
    up = start("--json", habits=WITH_ENGINES, parent=parent)
    up.ready_line()
    up.process.kill()
    up.wait_gone(seconds=10.0)
    assert len(recorded(up.pids_file)) == EVERYONE
    up.end()  # its output ends only when `tasuki up` itself is gone


def test_a_parent_that_is_gone_already_is_noticed(start: Start) -> None:
    code, _, err = start("--die-with-parent=999999").end()
    assert code == 2
    assert "may have ended already" in err


def test_a_process_that_dies_is_started_again(start: Start, tmp_path: Path) -> None:
    up = start("--json", f"--log-dir={tmp_path / 'logs'}", habits=WITH_ENGINES)
    ready = up.ready_line()
    router = next(pid for pid in recorded(up.pids_file)[::-1] if pid in running([pid]))
    assert up.process.stderr is not None
    for pid, name in ((ready["workers"][1]["pid"], b"decode-0"), (router, b"the router")):
        os.kill(pid, signal.SIGKILL)
        while not (line := up.process.stderr.readline()).startswith(name + b" is there again"):
            assert line, "it ended"
    assert len(running(recorded(up.pids_file))) == EVERYONE
    assert len(recorded(up.pids_file)) == EVERYONE + 3  # a server, its engine, and a router
    up.process.send_signal(signal.SIGINT)
    assert up.end()[0] == 0
    assert running(recorded(up.pids_file)) == []


def test_one_death_too_many_ends_the_run_with_a_word(start: Start, tmp_path: Path) -> None:
    up = start(
        "--json", f"--log-dir={tmp_path / 'logs'}", "--process-restarts=0", habits=WITH_ENGINES
    )
    ready = up.ready_line()
    os.kill(ready["workers"][1]["pid"], signal.SIGKILL)
    code, _, err = up.end()
    assert code == 1
    assert "--process-restarts" in err
    assert "decode-0" in err
    assert "SIGKILL" in err
    assert running(recorded(up.pids_file)) == []


def test_a_failed_start_says_why(start: Start) -> None:
    code, out, err = start(habits=("decode=fail", "prefill=engine")).end()
    assert (code, out) == (1, "")
    assert "the model does not fit" in err
    assert re.search(r"decode-0 \(process \d+\) did not start: it exited with code 3", err)


def test_a_port_in_use_is_said_before_anything_starts(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        up = start(f"--port={taken.getsockname()[1]}")
        code, _, err = up.end()
    assert code == 2
    assert "give another port" in err
    assert recorded(up.pids_file) == []


def test_a_directory_that_is_no_model(start: Start, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    up = start(f"--model={tmp_path / 'empty'}")
    code, _, err = up.end()
    assert code == 1
    assert "holds no config.json" in err
    assert recorded(up.pids_file) == []


def test_a_named_model_is_made_by_another_process(start: Start, tmp_path: Path) -> None:
    up = start(
        "--json", "--model=tiny", habits=("tasuki.convert=convert",), STANDIN_MODEL=str(tmp_path)
    )
    up.ready_line()
    up.process.send_signal(signal.SIGTERM)
    code, _, err = up.end()
    assert code == 0
    assert f"with model {tmp_path.name}" in err


def test_people_are_told_where_to_connect(start: Start) -> None:
    up = start()
    assert up.process.stdout is not None
    lines = [up.process.stdout.readline().decode() for _ in range(5)]
    assert [line.split()[:1] for line in lines[:3]] == [["router"], ["prefill-0"], ["decode-0"]]
    assert "generate --target 127.0.0.1:" in lines[4]
    up.process.send_signal(signal.SIGINT)
    assert up.end()[0] == 0
