"""Why handoffs end without a commit, as words for metrics and for the router. Pure."""

from __future__ import annotations

from tasuki.messages import ErrorStatus
from tasuki.reasons import AbandonReason

LOCAL_ENDINGS = (AbandonReason.FINISHED, AbandonReason.CANCELLED)  # no failure, no fallback
RETRIED = (  # on the next candidate: this one said no, or is gone
    AbandonReason.REFUSED,
    AbandonReason.LINK_DOWN,
    AbandonReason.PREFILL_DIED,
    AbandonReason.STALLED,
)
LINK_FAILURES = {
    "peer_died": AbandonReason.PREFILL_DIED,
    "digest": AbandonReason.DIGEST,
    "stalled": AbandonReason.STALLED,
}


def fallback_reason(error: ErrorStatus) -> AbandonReason:
    """Why a Prefill call that ended with `error` makes us compute here, as a fallback reason."""
    if error.reason in ("link_down", "layout", "deadline"):
        return AbandonReason(error.reason)
    if error.code in ("UNAVAILABLE", "CANCELLED", "INTERNAL") and error.reason != "draining":
        return AbandonReason.PREFILL_DIED
    late = error.code == "DEADLINE_EXCEEDED"
    return AbandonReason.DEADLINE if late else AbandonReason.REFUSED
