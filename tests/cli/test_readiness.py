"""When a cluster counts as ready, from what its router says."""

from __future__ import annotations

from typing import Any

import pytest

from cli.cluster.readiness import missing_from, missing_parts
from tasuki.errors import UnavailableError
from tests.cli.fake_router import FakeRouter, serving


def worker(role: str, number: int = 0, state: str = "ready") -> dict[str, str]:
    return {"role": role, "worker_id": f"{role}-{number}", "state": state, "address": "127.0.0.1:1"}


SPLIT = [worker("prefill"), worker("decode"), worker("decode", 1)]
LINKS = ["prefill-0->decode-0", "prefill-0->decode-1"]


@pytest.mark.parametrize(
    ("workers", "links", "missing"),
    [
        (SPLIT, LINKS, ""),
        (SPLIT, LINKS[:1], "link prefill-0->decode-1"),
        (SPLIT[:2], [], "1 of 2 decode workers"),
        ([worker("prefill", state="connecting"), *SPLIT[1:]], LINKS, "1 of 1 prefill workers"),
        ([], [], "1 of 1 prefill workers, 2 of 2 decode workers"),
    ],
)
async def test_split(workers: list[dict[str, str]], links: list[str], missing: str) -> None:
    async with serving(FakeRouter(facts={"workers": workers, "links": links})) as address:
        assert await missing_parts(address, 1, 2) == missing


async def test_colocated_needs_no_links() -> None:
    async with serving(FakeRouter(facts={"workers": [worker("decode")], "links": []})) as address:
        assert await missing_parts(address, 0, 1) == ""


async def test_a_router_that_does_not_answer() -> None:
    with pytest.raises(UnavailableError):
        await missing_parts("127.0.0.1:1", 1, 1)


@pytest.mark.parametrize("facts", [{}, {"workers": "[]"}, {"workers": "no", "links": "[]"}])
def test_facts_that_cannot_be_read(facts: dict[str, Any]) -> None:
    with pytest.raises(UnavailableError, match="facts cannot be read"):
        missing_from(facts, 1, 1)
