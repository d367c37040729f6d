"""The bounded words that say why: one table for metrics, status details and logs.

Knows nothing about what is done with them; imports nothing of ours.
"""

from __future__ import annotations

from enum import StrEnum


class PlacementReason(StrEnum):
    """Why a prompt is computed where it is."""

    PREFILL_AVAILABLE = "prefill_available"
    SHORT_PROMPT = "short_prompt"
    PREFIX_CACHED = "prefix_cached"
    NO_PREFILL_WORKER = "no_prefill_worker"
    PREFILL_BUSY = "prefill_busy"
    LINK_DOWN = "link_down"
    FORCED = "forced"
    MIGRATED = "migrated"  # another worker took it over, and computes what is known of it anew


class FallbackReason(StrEnum):
    """Why a decode worker computed the rest of a prompt although a prefill worker was named."""

    REFUSED = "refused"
    LINK_DOWN = "link_down"
    PREFILL_DIED = "prefill_died"  # or LINK_DOWN, if the data connection is seen to end first
    STALLED = "stalled"
    DIGEST = "digest"
    LAYOUT = "layout"
    DEADLINE = "deadline"


class MigrationReason(StrEnum):
    """Why a request went on on another decode worker."""

    DECODE_DIED = "decode_died"
    DRAINING = "draining"
    STALLED = "stalled"  # nothing is heard of the worker: stopped, or cut off


class RejectionReason(StrEnum):
    """Why a request was refused before its first token."""

    INVALID = "invalid"
    TOO_LONG = "too_long"
    QUEUE_FULL = "queue_full"
    NO_KV = "no_kv"
    DEADLINE = "deadline"
    NO_WORKER = "no_worker"
    DRAINING = "draining"
    PREDICTED_MISS = "predicted_miss"


class AbandonReason(StrEnum):
    """Why a handoff ended without a commit; the first seven are fallback reasons as well."""

    REFUSED = "refused"
    LINK_DOWN = "link_down"
    PREFILL_DIED = "prefill_died"
    STALLED = "stalled"
    DIGEST = "digest"
    LAYOUT = "layout"
    DEADLINE = "deadline"
    FINISHED = "finished"  # the first token was also the last
    CANCELLED = "cancelled"
