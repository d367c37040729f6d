"""A whole link over NCCL: two GPUs where they are, or one where NCCL takes two ranks on it."""

from __future__ import annotations

import time

import pytest
import torch

from tasuki.transfer.connectors.nccl_pair import LIBRARY_BYTES
from tasuki.transfer.link_events import HandoffDrained
from tests.gpu.conftest import Apart
from tests.gpu.pairs import leave, two_connectors
from tests.transfer.channels import Completions, open_pair
from tests.transfer.rig import make_rig

pytestmark = pytest.mark.gpu

SEGMENT, SEGMENTS = 4 << 20, 64


def hand_over(*devices: str) -> None:
    one, other = two_connectors((devices[0], devices[1]))
    rig = make_rig(one, peer_connector=other, devices=(devices[0], devices[1]))
    rig.open()  # with digests: its settings ask for them
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
    for sent, received in (
        ([*range(30)], [*range(30, 60)]),  # in place
        (order[:30], order[20:50]),  # staged
    ):
        handoff = rig.handoff(0, received)
        drained = len(rig.prefill.of(HandoffDrained))
        for first in range(0, 30, 7):
            rig.sender.offer(handoff.handoff_id, first, sent[first : first + 7])
        rig.sender.commit(handoff.handoff_id, 480)
        rig.loop.run_until(lambda h=handoff: h.is_committed)  # type: ignore[misc]
        rig.loop.run_until(lambda n=drained: len(rig.prefill.of(HandoffDrained)) > n)  # type: ignore[misc]
        rig.check()
        rig.assert_equal_blocks(sent, received)
        rig.receiver.forget(handoff.handoff_id)
    rig.close()
    leave()


def measure(*devices: str) -> None:
    """Bytes of a link that are not torch's, and speed; several links share the launching thread."""
    one, other = two_connectors((devices[0], devices[1]), links=4)
    ends = [open_pair(one, "first", peer=other, seconds=60)]
    free = torch.cuda.mem_get_info(devices[1])[0]
    ends += [open_pair(one, f"link{n}", peer=other, seconds=60) for n in range(3)]
    per_link = (free - torch.cuda.mem_get_info(devices[1])[0]) // 3
    per_end = per_link // (2 if devices[0] == devices[1] else 1)
    print(f"NCCL takes {per_end / (1 << 20):.1f} MiB per end of a link")
    source = torch.ones(SEGMENT, dtype=torch.uint8, device=devices[0])
    target = torch.zeros(SEGMENT, dtype=torch.uint8, device=devices[1])
    for name in devices:
        torch.cuda.synchronize(name)
    done, begin = Completions(), time.monotonic()
    for number in range(SEGMENTS):
        sender, receiver = ends[number % 4]
        sent = done.named(f"s{number}")
        receiver.post_receive(
            target, done.named(f"r{number}"),
            lambda sender=sender, sent=sent: sender.send(source, sent),  # type: ignore[misc]
        )  # fmt: skip
    done.wait(2 * SEGMENTS, 60)
    seconds = time.monotonic() - begin
    print(f"{SEGMENT * SEGMENTS / seconds / 1e9:.2f} GB/s over four links of one device")
    assert not any(done.errors.values())
    assert bool((target == 1).all())
    for sender, receiver in ends:
        sender.close()
        receiver.close()
    assert per_end <= LIBRARY_BYTES, "the KV budget keeps too little for links"
    leave()


@pytest.mark.parametrize("what", [hand_over, measure], ids=["handoff", "measure"])
def test_a_link_between_two_ranks(
    apart: Apart, nccl_devices: tuple[str, str] | None, what: object
) -> None:
    if nccl_devices is None:
        pytest.skip("two ranks need two GPUs, or NCCL 2.30 and newer")
    apart(what, *nccl_devices)
