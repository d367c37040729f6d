"""Half an hour of load leaves every process with as much memory, descriptors and threads as before.

Every answer is compared with an undisturbed one, some requests are given up midway, and in one of
the two runs links are cut, slowed and damaged all the time: what is opened anew must not pile up.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from cli.chaos import ChaosConfig, ChaosRun
from cli.cluster.local_cluster import LocalCluster
from experiments.chaos.schedule import MILD_FAULTS, Fault
from tests.chaos.process_samples import (
    QUIET_SLACK,
    SLACK,
    ProcessSamples,
    keep_sampling,
    processes_of,
)

pytestmark = [pytest.mark.soak, pytest.mark.dist]

SAMPLE_SECONDS = 10.0
MOST_OF_IT = 30  # samples at least, should the run be short
AROUND_IT = 300.0  # seconds for starting, for the undisturbed run, and for coming to rest


@pytest.mark.timeout(0)  # it has its own, for its length is an option
@pytest.mark.parametrize("faults", [(), MILD_FAULTS], ids=["quiet", "faults"])
def test_nothing_grows(faults: tuple[Fault, ...], pytestconfig: pytest.Config) -> None:
    seconds: float = pytestconfig.getoption("--soak-seconds")
    processes: dict[str, ProcessSamples] = {}

    async def sample(cluster: LocalCluster) -> None:
        processes.update(processes_of(cluster))
        await keep_sampling(processes, min(SAMPLE_SECONDS, seconds / MOST_OF_IT))

    run = ChaosRun(ChaosConfig(duration=seconds, seed=5), faults, beside=sample)

    async def within_its_time() -> None:
        async with asyncio.timeout(seconds + AROUND_IT):
            await run.serve()

    asyncio.run(within_its_time())
    print(json.dumps(run.tally.as_dict()))
    for name, process in processes.items():
        print(f"{name:<18} {process.describe()}")
    assert run.tally.is_clean
    assert run.tally.cancelled
    assert set(run.tally.kinds) == {fault.kind for fault in faults}
    assert len(processes) == 10
    slack = SLACK if faults else QUIET_SLACK
    problems = {name: found for name, one in processes.items() if (found := one.problems(slack))}
    assert not problems
