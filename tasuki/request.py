"""A request as an engine keeps it: tokens, progress, state.

Knows nothing about blocks, tensors or streams. There are no phases: `num_computed_tokens` chases
`num_tokens`, and a token is sampled whenever it catches up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tasuki.messages import FinishReason, SamplingParams, TokenLogprob

SAMPLE_KEYS = 1 << 48  # more than there will be keys of requests


def sample_key(key: int, sample_index: int) -> int:
    """The key of one of a request's samples; no request has it."""
    return key + sample_index * SAMPLE_KEYS


class RequestStatus(StrEnum):
    WAITING = "waiting"  # in the scheduler's queue
    RUNNING = "running"
    PARKED = "parked"  # outside the scheduler: a handoff, or another sample, owns its progress
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """One request in one engine. `output_token_ids` includes tokens given by earlier owners.

    Where several samples are asked for, this is the first one; the others split off with their
    first tokens, and are requests like any other from then on.
    """

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
    sample_index: int = 0
    first_sample: Request | None = None  # of a request that was split; None for that one itself
    other_samples: list[Request] = field(default_factory=list)  # PARKED until they share its blocks
    # of prompt tokens from the second on, while they are being computed; None: not wanted, or told
    prompt_logprobs: list[TokenLogprob] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        # whoever gave output tokens has told of the prompt before
        if self.sampling.prompt_logprobs is not None and not self.output_token_ids:
            self.prompt_logprobs = []
            self.skips_prefix_cache = True

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
        """Why the last output token ends the request, if it does. A stop goes before length."""
        output, sampling = self.output_token_ids, self.sampling
        if output and self.is_stop(output[-1]):
            return FinishReason.STOP
        if len(output) >= sampling.max_tokens:
            return FinishReason.LENGTH
        at_end = len(self.prompt_token_ids) + len(output) >= max_model_len
        return FinishReason.LENGTH if at_end else None

    def is_stop(self, token_id: int) -> bool:
        """Whether the last output token, this one, is an EOS or a stop token that counts."""
        sampling = self.sampling
        if len(self.output_token_ids) <= sampling.min_tokens:
            return False
        eos = token_id in self.eos_token_ids and not sampling.ignore_eos
        return eos or token_id in sampling.stop_token_ids

    @property
    def stop_token_id(self) -> int | None:
        """The stop token that ended the request; an EOS of the model is none of its own."""
        if self.finish_reason is not FinishReason.STOP:
            return None
        last = self.output_token_ids[-1]
        if last in self.eos_token_ids and not self.sampling.ignore_eos:
            return None
        return last

    # --- samples ----------------------------------------------------------------------------

    @property
    def group_key(self) -> int:
        """The key of the request that was added: the same for all of its samples."""
        return self.key if self.first_sample is None else self.first_sample.key

    @property
    def num_choices(self) -> int:
        """How many tokens the next logits choose: the first ones choose one for each sample."""
        return 1 if self.output_token_ids or self.first_sample else self.sampling.n

    def split(self, token_ids: Sequence[int], max_model_len: int) -> list[Request]:
        """Make the other samples, from their first tokens. Those that end with it are FINISHED."""
        for index, token_id in enumerate(token_ids, 1):
            sample = Request(
                key=sample_key(self.key, index),
                request_id=self.request_id,
                prompt_token_ids=self.prompt_token_ids,
                sampling=self.sampling,
                eos_token_ids=self.eos_token_ids,
                arrived=self.arrived,
                output_token_ids=[token_id],
                status=RequestStatus.PARKED,
                priority=self.priority,
                cache_salt=self.cache_salt,
                sample_index=index,
                first_sample=self,
            )
            sample.finish_reason = sample.reason_to_stop(max_model_len)
            if sample.finish_reason is not None:
                sample.status = RequestStatus.FINISHED
            self.other_samples.append(sample)
        return self.other_samples

    @property
    def parked_samples(self) -> list[Request]:
        """Those that wait until the prompt they share is computed."""
        return [sample for sample in self.other_samples if sample.status is RequestStatus.PARKED]

    def heir(self) -> Request:
        """The parked sample that computes the prompt in place of this one, which is over."""
        heir, *rest = self.parked_samples
        heir.other_samples = rest
        return heir

    # --- logprobs of the prompt -------------------------------------------------------------

    def logits_wanted(self, start: int, count: int) -> int:
        """How many of the last of `count` positions from `start` on need their logits.

        What was told of the prompt before a preemption is not computed again.
        """
        end = start + count
        if self.prompt_logprobs is None:
            return int(end == self.num_tokens)
        assert start <= len(self.prompt_logprobs), "a part of the prompt was not computed here"
        return max(0, end - max(start, len(self.prompt_logprobs)))

    def add_prompt_logprobs(self, logprobs: Iterable[TokenLogprob]) -> None:
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += logprobs

    def take_prompt_logprobs(self) -> list[TokenLogprob]:
        """All of them, once; they are not wanted any more."""
        taken, self.prompt_logprobs = self.prompt_logprobs or [], None
        return taken
