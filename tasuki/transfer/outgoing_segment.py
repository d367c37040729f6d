"""One announced message of KV on the prefill side, from its Announce until it is settled."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tasuki.transfer.send_queue import OfferedRun
from tasuki.transfer.staging import Staging


@dataclass(eq=False)
class OutgoingSegment:
    """One debt. It is settled once it was sent and the peer has it."""

    run: OfferedRun
    nbytes: int
    view: torch.Tensor
    staging: Staging | None
    posted: bool = False
    sent: bool = False
    received: bool = False
