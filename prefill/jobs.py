"""One prompt on a prefill worker: what was asked, how far it is, what was offered to the link."""

from __future__ import annotations

from dataclasses import dataclass

from tasuki.messages import PrefillRequest
from tasuki.request import Request
from tasuki.transfer.sending_link import SendingLink


@dataclass(eq=False)
class Job:
    stream_id: int
    asked: PrefillRequest
    request: Request
    link: SendingLink
    accepted_at: float
    sends: bool  # False when first tokens are certain to be the last: no KV is needed then
    next_block: int  # first logical block not offered yet
    drained: bool = False  # the link reads none of its blocks any more, and never will
    told: bool = False  # the stream has ended
