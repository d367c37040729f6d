"""Closing aborts, waits for the kernels, and leaves a device that computes."""

from __future__ import annotations

import time

import pytest
import torch

from tasuki.clock import monotonic
from tasuki.errors import TransferError
from tasuki.transfer.connector import ChannelSpec
from tasuki.transfer.connectors.nccl import NcclConnector
from tests.gpu.conftest import Apart
from tests.gpu.pairs import leave, two_connectors
from tests.transfer.channels import TOKENS, Completions, make_stores, open_pair

pytestmark = pytest.mark.gpu

NBYTES = 4 << 20


def computes(name: str) -> bool:
    return float(torch.ones(3, device=name).sum()) == 3.0


def wait_in_vain() -> None:
    spec = ChannelSpec("l" * 32, 0, TOKENS[0], TOKENS[1], NBYTES)
    connector, begin = NcclConnector(torch.device("cuda", 0), 1), monotonic()
    with pytest.raises(TransferError, match="no NCCL pair"):
        connector.open(spec, make_stores()[0], begin + 3.0)
    print(f"given up after {monotonic() - begin:.2f} s of 3")
    assert monotonic() - begin < 10
    assert computes("cuda:0")
    leave()


def close_in_flight(*devices: str) -> None:
    one, other = two_connectors((devices[0], devices[1]))
    sender, receiver = open_pair(one, peer=other, seconds=60)
    view = torch.full((NBYTES,), 7, dtype=torch.uint8, device=devices[1])
    torch.cuda.synchronize(devices[1])
    done, launched = Completions(), []
    receiver.post_receive(view, done.named("r0"), lambda: launched.append(time.monotonic()))
    receiver.post_receive(view, done.named("r1"))
    deadline = time.monotonic() + 20
    while not launched:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(0.2)  # the kernel spins by now
    assert not done.order
    begin = time.monotonic()
    receiver.close()
    print(f"fence of a spinning receive: {1000 * (time.monotonic() - begin):.1f} ms")
    assert done.order == ["r0", "r1"]
    assert all(done.errors.values())
    sender.send(torch.ones(NBYTES, dtype=torch.uint8, device=devices[0]), done.named("s"))
    time.sleep(0.2)
    sender.close()
    assert done.errors["s"] is not None
    assert bool((view == 7).all()), "something was written behind the fence"
    for name in devices:
        assert computes(name)
    for channel in open_pair(one, "again", peer=other, seconds=60):
        channel.close()
    leave()


def test_a_peer_that_does_not_come_is_given_up(apart: Apart) -> None:
    apart(wait_in_vain)


def test_a_receive_that_nobody_serves_is_fenced(
    apart: Apart, nccl_devices: tuple[str, str] | None
) -> None:
    if nccl_devices is None:
        pytest.skip("two ranks need two GPUs, or NCCL 2.30 and newer")
    apart(close_in_flight, *nccl_devices)
