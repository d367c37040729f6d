"""Every sampling parameter says the same wherever, and in how many attempts, it is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasuki.messages import FinishReason, TokenLogprob
from tasuki.transfer.connectors.loopback_fault import PlannedFault, Verdict
from tests.integration.streams import prompt
from tests.pair.relay import Outcome, inline_pair

PROMPT = prompt(300)
CASES: dict[str, dict[str, Any]] = {
    "nucleus": {"temperature": 0.9, "seed": 5, "top_k": 40, "top_p": 0.8, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "bias": {"temperature": 0.7, "seed": 6, "logit_bias": {65: 3.0, 66: -100.0}},
    "logprobs": {"temperature": 0.7, "seed": 6, "logprobs": 3, "prompt_logprobs": 2},
}


def check_logprobs(outcome: Outcome) -> None:
    """One for each token, and one for each token of the prompt but the first."""
    assert [one.token_id for one in outcome.logprobs] == outcome.token_ids
    assert [one.token_id for one in outcome.prompt_logprobs] == PROMPT[1:]
    for count, logprobs in ((3, outcome.logprobs), (2, outcome.prompt_logprobs)):
        assert all(len(one.top_token_ids) == count for one in logprobs)
        assert len({one.logprob for one in logprobs}) > 30


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [({}, ""), ({0: Verdict.FLIP}, "digest"), ({7: Verdict.FLIP}, "digest"),
     ({7: Verdict.DROP}, "link_down")],
    ids=["handed over", "nothing kept", "half kept", "link lost"],
)  # fmt: skip
async def test_split_and_fallback_are_as_local(
    tiny_model: Path, case: str, fault: dict[int, Verdict], reason: str
) -> None:
    async with inline_pair(tiny_model, PlannedFault(fault)) as pair:
        local = await pair.ask(PROMPT, split=False, **CASES[case])
        plain = await pair.ask(PROMPT, split=False)
        outcome = await pair.ask(PROMPT, **CASES[case])
        assert outcome.token_ids == local.token_ids != plain.token_ids
        assert outcome.logprobs == local.logprobs
        assert outcome.prompt_logprobs == local.prompt_logprobs
        assert outcome.fallback == reason
        if case == "logprobs":
            check_logprobs(outcome)
        await pair.until_idle()


async def test_prompt_logprobs_survive_a_prefill_worker_that_never_began(
    tiny_model: Path,
) -> None:
    async with inline_pair(tiny_model, prefill={"kv_blocks": 8}) as pair:
        local = await pair.ask(PROMPT, split=False, **CASES["logprobs"])
        outcome = await pair.ask(PROMPT, **CASES["logprobs"])
        assert outcome.fallback == "refused"
        assert outcome.kept_tokens == 0
        assert (outcome.token_ids, outcome.logprobs) == (local.token_ids, local.logprobs)
        assert outcome.prompt_logprobs == local.prompt_logprobs
        check_logprobs(outcome)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("given", [1, 20, 63])
async def test_another_worker_goes_on_where_one_stopped(
    tiny_model: Path, case: str, given: int
) -> None:
    """Counts start at the original prompt; what was told of the prompt is not told again."""
    async with inline_pair(tiny_model) as pair:
        whole = await pair.ask(PROMPT, split=False, **CASES[case])
        rest = await pair.ask(PROMPT, given=whole.token_ids[:given], **CASES[case])
        assert rest.token_ids == whole.token_ids
        assert rest.logprobs == whole.logprobs[given:]
        assert rest.prompt_logprobs == []


async def test_a_stop_token_ends_a_request_wherever_it_comes(tiny_model: Path) -> None:
    async with inline_pair(tiny_model) as pair:
        whole = (await pair.ask(PROMPT, split=False)).token_ids
        places = [0, 1, *range(10, 30, 5)]
        for split in (True, False):
            for place in places:
                stop = whole[place]
                outcome = await pair.ask(PROMPT, split=split, stop_token_ids=[stop, 3])
                assert outcome.token_ids == whole[: whole.index(stop) + 1]
                assert outcome.finished is not None
                assert outcome.finished.finish_reason is FinishReason.STOP
                assert outcome.finished.stop_token_id == stop
                assert outcome.fallback == ""
                assert outcome.computed_prompt_tokens == (0 if split else len(PROMPT))
        assert [first.token_ids for first in pair.first_tokens] == [whole[:1]] * len(places)
        await pair.until_idle()


async def test_min_tokens_hold_on_both_workers(tiny_model: Path) -> None:
    async with inline_pair(tiny_model) as pair:
        stops = list(range(32, 92))
        got = [
            await pair.ask(PROMPT, split=split, stop_token_ids=stops, min_tokens=n)
            for n in (0, 1, 12)
            for split in (True, False)
        ]
        for one, other in zip(got[::2], got[1::2], strict=True):
            assert one.token_ids == other.token_ids
        for n, one in zip((0, 1, 12), got[::2], strict=True):
            assert len(one.token_ids) > n
            assert not set(one.token_ids[:-1]) & set(stops)
            assert one.token_ids[-1] in stops
        first = got[0].token_ids[:1]
        for split in (True, False):  # what would be the first token is masked there
            one = await pair.ask(PROMPT, split=split, stop_token_ids=first, min_tokens=1)
            assert one.token_ids[:1] != first


async def test_logprobs_are_those_of_the_raw_distribution(tiny_model: Path) -> None:
    """Neither penalties nor temperature change what is told about the same tokens."""
    async with inline_pair(tiny_model) as pair:
        plain = await pair.ask(PROMPT, logprobs=0, max_tokens=1)
        bent = await pair.ask(
            PROMPT, logprobs=1, max_tokens=1, temperature=3.0, logit_bias={plain.token_ids[0]: -50}
        )
        (told,), (other,) = plain.logprobs, bent.logprobs
        assert (told.rank, told.top_token_ids) == (1, [])
        assert other.token_id != told.token_id
        assert other.rank > 1
        expected = TokenLogprob(
            token_id=other.token_id, logprob=other.logprob, rank=other.rank,
            top_token_ids=[told.token_id], top_logprobs=[told.logprob],
        )  # fmt: skip
        assert other == expected
