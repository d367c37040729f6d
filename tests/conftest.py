"""Rules for every test: nothing stays behind, and where TASUKI_REQUIRE says so none is skipped."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tasuki.cache_root import cache_root
from tasuki.convert.demo import ensure_demo
from tasuki.errors import ModelError
from tests.leftovers import look, settle
from tests.require import require, required

KEPT_VARIABLES = ("TASUKI_REQUIRE", "TASUKI_CACHE")
FAILED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Here and not beside the test that reads it: pytest asks only what it loads at its start."""
    parser.addoption(
        "--soak-seconds", type=float, default=1800.0, help="seconds of load of each soak test"
    )


def pytest_configure(config: pytest.Config) -> None:
    """A developer's own TASUKI_ settings must not reach the processes that tests start."""
    for name in [name for name in os.environ if name.startswith("TASUKI_")]:
        if name not in KEPT_VARIABLES:
            del os.environ[name]


@pytest.fixture(autouse=True)
def nothing_stays_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a child, a thread, a descriptor or shared memory: tests.leftovers.

    It is the first fixture of a test to be set up and the last to be torn down; but one of a wider
    scope than a function stands outside it, and may hold what it likes until its own end. A test
    that failed is not checked: its traceback keeps alive whatever it held.
    """
    before = look()
    yield
    if request.node.stash.get(FAILED, False):
        return
    left = settle(before)
    if left:
        pytest.fail("the test left behind: " + "; ".join(left), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure under TASUKI_REQUIRE=all; a GPU test may be skipped."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    exempt = hasattr(report, "wasxfail") or item.get_closest_marker("gpu") is not None
    if report.skipped and not exempt and required("all"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which TASUKI_REQUIRE=all forbids: {_reason(report)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a module that skips itself while it is collected."""
    report = yield
    if report.skipped and required("all"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which TASUKI_REQUIRE=all forbids: {_reason(report)}"
    return report


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    return str(report.longrepr)


@pytest.fixture(scope="session")
def demo_directory() -> Path:
    """The converted demo model, if it was made before: tests need no network."""
    try:
        return ensure_demo(cache_root(os.environ), fetch=False)
    except ModelError as error:
        require("demo", False, f"{error.message}; `make up` or `python -m tasuki.convert demo`")
        raise AssertionError("unreachable: require() does not return") from None
