"""One rank that sends to itself: the group is built as a link builds it, and really moves bytes."""

from __future__ import annotations

import time

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined] # exported, unlisted

from tasuki.transfer.connectors.nccl_pair import EventFlight, make_group, make_stream
from tests.gpu.conftest import Apart
from tests.gpu.pairs import leave

pytestmark = pytest.mark.gpu

NBYTES = 4 << 20


def send_to_itself() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = HashStore()
    group = make_group(store, 0, 1, 30.0)
    source = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    torch.cuda.synchronize(device)
    stream = make_stream(device)
    for _ in range(3):
        target.zero_()
        torch.cuda.synchronize(device)
        with torch.cuda.stream(stream):
            group._start_coalescing()  # a send to itself alone would wait for ever
            group.send([source], 0, 0)
            group.recv([target], 0, 0)
            work = group._end_coalescing()
            work.synchronize()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        flight, deadline = EventFlight(event, work), time.monotonic() + 30
        while not flight.has_ended():
            assert time.monotonic() < deadline, "the send did not end"
            time.sleep(0.0005)
        assert torch.equal(source, target)
    begin = time.monotonic()
    group.abort()
    print(f"abort of an idle group: {1000 * (time.monotonic() - begin):.1f} ms")
    assert float(torch.ones(3, device=device).sum()) == 3.0, "the device still computes"
    leave()


def test_bytes_arrive_and_the_group_can_be_aborted(apart: Apart) -> None:
    apart(send_to_itself)
