"""`tasuki status` against small real servers, and what it makes of their facts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from cli.main import main
from cli.status import Status, Worker, exactness
from tasuki.client import ServerDescription
from tests.cli.fake_router import FakeRouter, serving


def worker(role: str, worker_id: str, address: str) -> dict[str, str]:
    return {
        "role": role, "worker_id": worker_id, "worker_epoch": "00ab", "address": address,
        "state": "ready",
    }  # fmt: skip


async def status(*argv: str, **facts: Any) -> int:
    async with serving(FakeRouter(facts=facts)) as address:
        return await asyncio.to_thread(main, ["status", "--target", address, *argv])


async def test_it_asks_every_worker_and_shows_one_that_is_silent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = {"exactness": "x", "dtype": "y"}  # the fake quotes each fact
    async with serving(FakeRouter(facts=told)) as decode:
        workers = [worker("decode", "d0", decode), worker("prefill", "p0", "127.0.0.1:1")]
        assert await status(workers=workers, links=["p0->d0"]) == 0
    out = capsys.readouterr().out
    assert "d0  decode, ready" in out
    assert '  exactness               "x"' in out
    assert "p0  prefill, ready, 127.0.0.1:1\n  does not answer" in out
    assert "open links: p0->d0" in out


async def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    workers = [worker("decode", "d0", "127.0.0.1:1")]
    assert await status("--json", workers=workers, links=[]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["workers"][0]["facts"] is None
    assert found["results"] == "not known"


async def test_a_process_that_is_no_router_and_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    assert await status() == 1
    assert "expected the address of a router" in capsys.readouterr().err
    arguments = ["status", "--target", "127.0.0.1:1", "--timeout", "2"]
    assert await asyncio.to_thread(main, arguments) == 1


def of(*facts: tuple[str, str, str]) -> Status:
    """(role, exactness, numerics) of each worker."""
    workers = [
        Worker(role, f"w{n}", "0", f"a:{n}", "ready") for n, (role, _, _) in enumerate(facts)
    ]
    known = {f"a:{n}": {"exactness": e, "numerics": k} for n, (_, e, k) in enumerate(facts)}
    return Status(ServerDescription("router", "", 0, "", 0, 0, "", {}, {}), workers, [], known)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ([("decode", "bit-exact", "a")], "bit-exact"),
        (
            [("decode", "bit-exact", "a"), ("prefill", "bit-exact", "a")],
            "bit-exact, wherever a prompt is computed",
        ),
        (
            [("decode", "bit-exact", "a"), ("prefill", "bit-exact", "b")],
            "tokens compared within tolerance: the workers compute in different ways",
        ),
        (
            [("decode", "bit-exact", "a"), ("prefill", "tokens compared within tolerance", "a")],
            "bit-exact, tokens compared within tolerance",
        ),
        ([], "no workers"),
    ],
)
def test_what_may_be_said_of_results(facts: list[tuple[str, str, str]], words: str) -> None:
    assert exactness(of(*facts)) == words
