"""A lease on KV blocks, from reservation to commit, and one that breaks off (see docs/lease.md).

Both machines are the ones that the workers run; only the network between them is missing.
"""

from tasuki.reasons import AbandonReason
from tasuki.transfer.handoff import Handoff
from tasuki.transfer.outgoing_handoff import OutgoingHandoff

BLOCKS, TOKENS = 3, 40  # a prompt of 40 tokens fills two blocks of 16 and part of a third


def show(event: str, now: float, decode: Handoff, prefill: OutgoingHandoff | None) -> None:
    print(f"{now:4.1f}  {event:<38}{decode.state:<14}{prefill.state if prefill else '-'}")


def begin() -> tuple[Handoff, OutgoingHandoff]:
    decode = Handoff("h1", "r1", "l1", 0, BLOCKS, now=0, progress_timeout=5, reserve_timeout=2)
    show("blocks are reserved", 0.0, decode, None)
    decode.dispatch(0.1)
    prefill = OutgoingHandoff("h1", 0, BLOCKS, now=0.2, progress_timeout=5)
    decode.accept(0.3)
    show("dispatched and accepted", 0.3, decode, prefill)
    prefill.offer(0, 2)  # the first chunk is computed: two full blocks
    prefill.announce(2, 1.0)
    decode.announce(0, 2, 1.1)  # a receive is posted: from here on somebody may write
    show("two blocks announced", 1.1, decode, prefill)
    return decode, prefill


def whole_life() -> None:
    decode, prefill = begin()
    decode.receive(0, 2, 1.2)
    prefill.receive(2, 1.3)
    prefill.offer(2, 1)
    prefill.announce(1, 2.0)
    prefill.commit(TOKENS)
    prefill.finish_commit(2.0)
    decode.announce(2, 1, 2.1)
    decode.commit(TOKENS, BLOCKS, 2.1)
    show("Commit is here, the last block not", 2.1, decode, prefill)
    decode.receive(2, 1, 2.2)
    decode.first_token(2.2)
    prefill.receive(1, 2.3)
    show(f"all received; drained: {prefill.drained}", 2.3, decode, prefill)


def broken_off() -> None:
    decode, prefill = begin()
    decode.abandon(AbandonReason.CANCELLED, 3.0)  # the client went away
    prefill.abandon(AbandonReason.CANCELLED, 3.1)
    show(f"cancelled; quarantined: {sorted(decode.posted)}", 3.1, decode, prefill)
    now = prefill.deadline  # what was announced is owed all the same
    show(f"drained: {prefill.drained}; stalled: {prefill.stalled(now)}", now, decode, prefill)


for life in (whole_life, broken_off):
    print(f"--- {life.__name__}\ntime  event{'':<33}decode        prefill")
    life()
