"""One prompt on a prefill worker: what was asked, how far it is, what was offered to the link."""

from __future__ import annotations

from dataclasses import dataclass

from tasuki.messages import FinishReason, PrefillRequest
from tasuki.request import Request
from tasuki.transfer.sending_link import SendingLink


@dataclass(eq=False)
class Job:
    stream_id: int
    asked: PrefillRequest
    request: Request
    link: SendingLink
    accepted_at: float
    sends: bool  # False when the first token is certain to be the last: no KV is needed then
    next_block: int  # first logical block not offered yet
    drained: bool = False  # the link reads none of its blocks any more, and never will
    told: bool = False  # the stream has ended

    def finish_reason(self, token_id: int, max_model_len: int) -> FinishReason | None:
        """Why the first token is also the last one, if it is, by the caller's limits."""
        if self.request.is_stop(token_id):
            return FinishReason.STOP
        at_end = self.request.prompt_len + 1 >= max_model_len
        return FinishReason.LENGTH if at_end or self.asked.sampling.max_tokens == 1 else None
