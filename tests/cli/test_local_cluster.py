"""Real processes, stand-ins for the roles: start, failure, death, stop. Nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cli.cluster.child import ProcessError
from cli.cluster.cluster_spec import ClusterSpec
from cli.cluster.local_cluster import LocalCluster
from tasuki.messages import Role
from tests.cli.programs import nothing_missing, recorded, running, standin


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which stand-ins write their process ids."""
    path = tmp_path / "pids"
    monkeypatch.setenv("STANDIN_PIDS", str(path))
    return path


def cluster(
    tmp_path: Path, habits: dict[str, list[str]] | None = None, **more: Any
) -> LocalCluster:
    settings: dict[str, Any] = {
        "start_timeout": 20.0,
        "stop_timeout": 5.0,
        "log_dir": tmp_path / "logs",
    }
    spec = ClusterSpec(model=tmp_path, program=standin(habits), **(settings | more))
    return LocalCluster(spec, probe=nothing_missing)


async def test_starts_workers_then_the_router_with_their_addresses(
    tmp_path: Path, pids: Path
) -> None:
    async with cluster(tmp_path, {"decode": ["engine"]}, prefill=1, decode=2) as running_cluster:
        await running_cluster.wait_ready()
        prefill, decode = (running_cluster.workers_of(role) for role in (Role.PREFILL, Role.DECODE))
        assert [worker.worker_id for worker in (*prefill, *decode)] == [
            "prefill-0",
            "decode-0",
            "decode-1",
        ]
        assert len(running(recorded(pids))) == 6  # four servers, two engines
        words = (tmp_path / "logs" / "router.log").read_text()
        assert f"--prefill-workers={prefill[0].address}" in words
        assert f"--decode-workers={decode[0].address},{decode[1].address}" in words
    assert running(recorded(pids)) == []


async def test_a_failed_start_shows_the_last_words_and_ends_the_others(
    tmp_path: Path, pids: Path
) -> None:
    with pytest.raises(ProcessError, match=r"(?s)decode-0.*code 3.*the model does not fit"):
        async with cluster(tmp_path, {"decode": ["fail"], "prefill": ["engine"]}):
            pytest.fail("it must not get here")
    assert recorded(pids)  # how many got that far before the failure is chance
    assert running(recorded(pids)) == []


@pytest.mark.parametrize("role", ["prefill", "router"])
async def test_a_silent_process_is_named_when_the_deadline_passes(
    tmp_path: Path, pids: Path, role: str
) -> None:
    with pytest.raises(ProcessError, match=rf"had 0\.5 s to start.*a word from {role}"):
        async with cluster(tmp_path, {role: ["silent"]}, start_timeout=0.5):
            pytest.fail("it must not get here")
    assert running(recorded(pids)) == []


async def test_a_wrong_ready_line_is_shown(tmp_path: Path, pids: Path) -> None:
    with pytest.raises(ProcessError, match="prefill-0 wrote 'not json' as its ready line"):
        async with cluster(tmp_path, {"prefill": ["garbage"]}):
            pytest.fail("it must not get here")
    assert running(recorded(pids)) == []


async def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    spec = ClusterSpec(model=tmp_path, program=lambda role: [str(tmp_path / "nothing")])
    with pytest.raises(ProcessError, match="prefill-0 could not be started"):
        async with LocalCluster(spec, probe=nothing_missing):
            pytest.fail("it must not get here")


async def test_waiting_for_readiness_says_what_is_missing(tmp_path: Path, pids: Path) -> None:
    async def never(address: str, prefill: int, decode: int) -> str:
        return f"link of {prefill} and {decode}"

    spec = ClusterSpec(model=tmp_path, program=standin(), start_timeout=1.0)
    with pytest.raises(ProcessError, match="become ready; still missing: link of 1 and 1"):
        async with LocalCluster(spec, probe=never) as started:
            await started.wait_ready()
    assert running(recorded(pids)) == []


async def test_a_death_while_waiting_for_readiness_ends_the_wait(
    tmp_path: Path, pids: Path
) -> None:
    async def never(address: str, prefill: int, decode: int) -> str:
        return "everything"

    spec = ClusterSpec(
        model=tmp_path, program=standin({"decode": ["restless"]}), log_dir=tmp_path / "logs"
    )
    with pytest.raises(
        ProcessError, match=r"decode-0 \(process \d+\) is gone: it exited with code 5"
    ):
        async with LocalCluster(spec, probe=never) as started:
            await started.wait_ready()
    assert running(recorded(pids)) == []


async def test_a_death_is_noticed_and_described(tmp_path: Path, pids: Path) -> None:
    async with cluster(tmp_path) as started:
        death = asyncio.ensure_future(started.wait_death())
        os.kill(started.workers[0].pid, signal.SIGKILL)
        words = await asyncio.wait_for(death, 10)
    assert "prefill-0" in words
    assert "SIGKILL" in words


async def test_a_process_ended_on_purpose_is_no_news(tmp_path: Path, pids: Path) -> None:
    async with cluster(tmp_path, {"decode": ["engine"]}, decode=2) as started:
        death = asyncio.ensure_future(started.wait_death())
        first, second = started.workers_of(Role.DECODE)
        started.kill(first)
        assert await asyncio.wait_for(started.wait_exit(first), 10) == -signal.SIGKILL
        assert not death.done()
        os.kill(second.pid, signal.SIGKILL)
        assert "decode-1" in await asyncio.wait_for(death, 10)
    # The killed server's engine was left to itself; it went with the cluster at the latest.
    assert running(recorded(pids)) == []


async def test_the_deaf_are_killed_after_the_deadline(tmp_path: Path, pids: Path) -> None:
    begun = asyncio.get_running_loop().time()
    async with cluster(tmp_path, {"decode": ["deaf", "engine"]}, stop_timeout=0.5):
        pass
    assert 0.5 <= asyncio.get_running_loop().time() - begun < 5
    assert running(recorded(pids)) == []


async def test_kill_all_makes_stop_quick(tmp_path: Path, pids: Path) -> None:
    async with cluster(tmp_path, {"decode": ["deaf"]}, stop_timeout=60.0) as started:
        begun = asyncio.get_running_loop().time()
        asyncio.get_running_loop().call_later(0.1, started.kill_all)
    assert asyncio.get_running_loop().time() - begun < 10
    assert running(recorded(pids)) == []


async def test_cancelling_the_start_leaves_nothing(tmp_path: Path, pids: Path) -> None:
    started = asyncio.ensure_future(cluster(tmp_path, {"prefill": ["silent"]}).__aenter__())
    until = asyncio.get_running_loop().time() + 10
    while len(recorded(pids)) < 2:
        assert asyncio.get_running_loop().time() < until
        await asyncio.sleep(0.01)
    started.cancel()
    with pytest.raises(asyncio.CancelledError):
        await started
    assert running(recorded(pids)) == []


async def test_without_a_log_directory_words_go_to_our_stderr(
    tmp_path: Path, pids: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ProcessError, match="its messages stand above"):
        async with cluster(tmp_path, {"prefill": ["fail"]}, log_dir=None):
            pytest.fail("it must not get here")
    captured = capfd.readouterr()
    assert "the model does not fit" in captured.err
    assert captured.out == ""


async def test_stop_twice_is_fine(tmp_path: Path, pids: Path) -> None:
    started = await cluster(tmp_path).__aenter__()
    await started.stop()
    await started.stop()
    assert running(recorded(pids)) == []
