"""A request as an engine keeps it: tokens, progress, state.

Knows nothing about blocks, tensors or streams. There are no phases: `num_computed_tokens` chases
`num_tokens`, and a token is sampled whenever it catches up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tasuki.messages import FinishReason, SamplingParams


class RequestStatus(StrEnum):
    WAITING = "waiting"  # in the scheduler's queue
    RUNNING = "running"
    PARKED = "parked"  # outside the scheduler: a handoff owns its progress
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """One request in one engine. `output_token_ids` includes tokens given by earlier owners."""

    key: int  # unique in this engine; a request id may be seen twice
    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: frozenset[int]
    arrived: float
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    preemptions: int = 0
    bypasses: int = 0  # how often one behind it in the queue was admitted first
    holds_blocks: bool = False  # its blocks outlive it: a handoff still sends them
    computed_prompt_tokens: int = 0  # prompt positions computed by this engine, recomputes included
    first_scheduled: float | None = None
    queued: float = 0.0  # when it last began to wait
    priority: int = 0  # lower goes first, where the scheduler's policy is `priority`
    cache_salt: str = ""  # requests with different ones share no prefix
    skips_prefix_cache: bool = False  # it wants something of every prompt position
    cached_tokens: int = 0  # prompt tokens found in the prefix cache at its first admission

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens whose values are known: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def remaining_tokens(self) -> int:
        """Known tokens whose KV is not computed yet; one in steady decode."""
        return self.num_tokens - self.num_computed_tokens

    def tokens(self, start: int, count: int) -> list[int]:
        """`count` token ids from position `start`, across prompt and output."""
        split = self.prompt_len
        if start + count <= split:
            return self.prompt_token_ids[start : start + count]
        if start >= split:
            return self.output_token_ids[start - split : start - split + count]
        return self.prompt_token_ids[start:] + self.output_token_ids[: start + count - split]

    def append(self, token_id: int, max_model_len: int) -> None:
        """Take one sampled token and decide whether it is the last."""
        self.output_token_ids.append(token_id)
        self.finish_reason = self.reason_to_stop(max_model_len)

    def reason_to_stop(self, max_model_len: int) -> FinishReason | None:
        """Why the last output token ends the request, if it does. EOS goes before length."""
        output, sampling = self.output_token_ids, self.sampling
        if output and not sampling.ignore_eos and output[-1] in self.eos_token_ids:
            return FinishReason.STOP
        if len(output) >= sampling.max_tokens:
            return FinishReason.LENGTH
        at_end = len(self.prompt_token_ids) + len(output) >= max_model_len
        return FinishReason.LENGTH if at_end else None
