"""What a chaos run is made of: its schedule, its requests, and its sums."""

from __future__ import annotations

from itertools import islice

from cli.counters import Counters, Sample
from experiments.chaos.requests import draw_requests
from experiments.chaos.schedule import EVERY_FAULT, MILD_FAULTS, FaultKind, plan
from experiments.chaos.tally import STATES, Answer, Tally

WANT = [[5, 6, 7]]


def answer(*tokens: int, **fields: object) -> Answer:
    made = Answer([list(tokens)])
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_every_fault_strikes_in_every_round_and_a_seed_says_when() -> None:
    rounds = list(islice(plan(4), 3 * len(EVERY_FAULT)))
    for first in range(0, len(rounds), len(EVERY_FAULT)):
        some = {planned.fault for planned in rounds[first : first + len(EVERY_FAULT)]}
        assert some == set(EVERY_FAULT)
    times = [planned.at for planned in rounds]
    assert times == sorted(times)
    assert rounds == list(islice(plan(4), len(rounds)))
    assert rounds != list(islice(plan(5), len(rounds)))
    assert {fault.kind for fault in EVERY_FAULT} == set(FaultKind)


def test_a_plan_can_be_of_some_faults_only_or_of_none() -> None:
    struck = {planned.fault for planned in islice(plan(4, MILD_FAULTS), len(MILD_FAULTS))}
    assert struck == set(MILD_FAULTS)
    assert {fault.kind for fault in struck} == {"cut", "slow", "corrupt"}
    assert list(plan(4, ())) == []


def test_requests_fit_and_are_the_same_for_a_seed() -> None:
    asks = draw_requests(1, most=200)
    assert asks == draw_requests(1, most=200)
    assert all(len(ask.prompt_token_ids) + ask.max_tokens <= 200 for ask in asks)
    assert all(ask.prompt_token_ids for ask in asks)
    assert {ask.num_samples for ask in asks} == {1, 2}
    assert [ask.number for ask in asks] == list(range(len(asks)))


def test_indices_tell_what_is_repeated_and_what_is_missing() -> None:
    good, twice, gap = answer(), answer(), answer()
    for one in (good, twice, gap):
        one.take(0, 0, (5, 6))
    good.take(0, 2, (7,))
    twice.take(0, 1, (6, 7))
    gap.take(0, 3, (7,))
    assert [one.repeated for one in (good, twice, gap)] == [0, 1, 0]
    assert [one.skipped for one in (good, twice, gap)] == [0, 0, 1]


def test_every_request_counts_once() -> None:
    tally = Tally()
    tally.count(answer(5, 6, 7, stall=0.5), WANT)
    tally.count(answer(5, 6, 8), WANT)
    tally.count(answer(5, 6), WANT)  # it ended early and said that it was complete
    tally.count(answer(5, error="UNAVAILABLE: no_worker"), WANT)
    tally.count(answer(5, 7, skipped=1), WANT)
    tally.count(answer(5, 6, 6, repeated=1), WANT)
    tally.count(answer(5, 6, cancelled=True), WANT)
    tally.count(answer(9, cancelled=True), WANT)
    assert tally.requests == 8 == tally.completed + tally.lost + tally.cancelled
    assert (tally.completed, tally.lost, tally.cancelled) == (4, 2, 2)
    assert (tally.changed, tally.duplicated) == (4, 1)
    assert tally.worst_stall_seconds == 0.5
    assert not tally.is_clean
    assert tally.as_dict()["errors"] == {"UNAVAILABLE: no_worker": 1, "tokens were skipped": 1}


def test_what_was_never_hit_is_named() -> None:
    tally = Tally()
    assert len(tally.missed) == len(FaultKind) + len(STATES)
    tally.kinds.update(FaultKind)
    tally.states.update(STATES[1:])
    assert tally.missed == ["reserved"]
    assert tally.is_clean


def test_counters_outlive_their_processes() -> None:
    def page(value: float) -> dict[Sample, float]:
        return {("migrations_total", (("reason", "stalled"),)): value, ("links", ()): 3.0}

    counters = Counters()
    for process, value in (("a", 2.0), ("a", 5.0), ("b", 1.0), ("a", 1.0), ("a", 4.0)):
        counters.take(process, page(value))
    assert counters.total("migrations_total") == 5 + 4 + 1
    assert counters.total("fallbacks_total") == 0
