"""The --cpus notation."""

from __future__ import annotations

import os

import pytest

from cli.cluster.cpu_list import share
from tasuki.engine.affinity import format_cpus, parse_cpus
from tasuki.errors import ConfigError


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("", ()), ("  ", ()), ("0", (0,)), ("0,2-3", (0, 2, 3)), ("3, 1", (3, 1)), ("2-2", (2,))],
)
def test_reads_the_notation(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cpus
    assert parse_cpus(format_cpus(cpus)) == cpus


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a", "'a'"),
        ("1,,2", "''"),
        ("-1", "'-1'"),
        ("3-1", "counts up"),
        ("1-", "'1-'"),
        ("1,0-1", "core 1 twice"),
        ("7,8", "may use 0,1,2,3,4,5,6,7"),
        ("0-99999999999", "counts up"),
    ],
)
def test_refuses_in_words(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_cpus(text)


def test_deals_cores_in_turn() -> None:
    assert [share((4, 5, 6), worker, 1) for worker in range(4)] == [(4,), (5,), (6,), (4,)]
    assert [share((0, 1, 2, 3), worker, 2) for worker in range(3)] == [(0, 1), (2, 3), (0, 1)]


def test_never_deals_a_core_twice_to_one_worker() -> None:
    assert share((0, 1), 0, 4) == (0, 1)


def test_no_list_means_no_pinning() -> None:
    assert share((), 3, 2) == ()
