"""What a slow caller lets pile up: joined, and nothing of it lost."""

from __future__ import annotations

import msgspec

from tasuki.messages import (
    DispatchedEvent,
    FallbackEvent,
    FinishedEvent,
    FinishReason,
    FirstTokenParts,
    HandoffTimings,
    TokenLogprob,
    TokensEvent,
)
from tasuki.server.request_streams import AnyEvent, is_last, merge_tokens


def logprob(token_id: int) -> TokenLogprob:
    return TokenLogprob(
        token_id=token_id, logprob=-1.0 / token_id, rank=1, top_token_ids=[], top_logprobs=[]
    )


def tokens(index: int, *ids: int) -> TokensEvent:
    return TokensEvent(
        index=index, token_ids=[*ids], offsets=[float(id_) for id_ in ids],
        logprobs=[logprob(id_) for id_ in ids],
    )  # fmt: skip


def test_neighbouring_tokens_are_joined_with_all_that_came_with_them() -> None:
    first = TokensEvent(
        index=0, token_ids=[5], offsets=[5.0], logprobs=[logprob(5)],
        parts=FirstTokenParts(reservation=1.0), cached_tokens=3, computed_prompt_tokens=4,
        prompt_logprobs=[logprob(8), logprob(9)],
    )  # fmt: skip
    placed = DispatchedEvent(prefill_worker_id="p")
    fallback = FallbackEvent(reason="digest", kept_tokens=16)
    events: list[AnyEvent] = [
        placed,
        first,
        tokens(1, 6, 7),
        tokens(3, 8),
        fallback,
        tokens(4, 9),
        tokens(5, 1),
    ]
    joined = TokensEvent(
        index=0, token_ids=[5, 6, 7, 8], offsets=[5.0, 6.0, 7.0, 8.0],
        logprobs=[logprob(5), logprob(6), logprob(7), logprob(8)], parts=first.parts,
        cached_tokens=3, computed_prompt_tokens=4, prompt_logprobs=first.prompt_logprobs,
    )  # fmt: skip
    assert merge_tokens(events) == [placed, joined, fallback, tokens(4, 9, 1)]


def test_tokens_are_joined_sample_by_sample() -> None:
    def of(sample_index: int, event: TokensEvent) -> TokensEvent:
        return msgspec.structs.replace(event, sample_index=sample_index)

    end = FinishedEvent(
        finish_reason=FinishReason.STOP, prompt_tokens=1, output_tokens=2, cached_tokens=0,
        computed_prompt_tokens=0, handoff=HandoffTimings(), sample_index=1, samples_left=1,
    )  # fmt: skip
    events: list[AnyEvent] = [
        of(0, tokens(0, 5)), of(1, tokens(0, 6)), of(0, tokens(1, 7)), of(1, tokens(1, 8)), end,
        of(0, tokens(2, 9)),
    ]  # fmt: skip
    both = [of(0, tokens(0, 5, 7)), of(1, tokens(0, 6, 8))]
    assert merge_tokens(events) == [*both, end, of(0, tokens(2, 9))]


def test_a_stream_ends_with_its_last_sample() -> None:
    end = FinishedEvent(
        finish_reason=FinishReason.STOP, prompt_tokens=1, output_tokens=2, cached_tokens=0,
        computed_prompt_tokens=0, handoff=HandoffTimings(), samples_left=1,
    )  # fmt: skip
    assert not is_last(end)
    assert is_last(msgspec.structs.replace(end, samples_left=0))
