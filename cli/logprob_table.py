"""A table of how likely tokens were. Knows nothing about clusters or clocks."""

from __future__ import annotations

from collections.abc import Sequence

from tasuki.client import TokenLogprob


def render_logprobs(title: str, logprobs: Sequence[TokenLogprob]) -> str:
    """One line per token: its id, log probability and rank, and the likeliest ids with theirs."""
    lines = [f"{title:>10} {'logprob':>9} {'rank':>6}  likeliest"]
    for one in logprobs:
        best = "  ".join(
            f"{token_id} {logprob:.3f}" for token_id, logprob in one.top_logprobs.items()
        )
        lines.append(f"{one.token_id:>10} {one.logprob:>9.3f} {one.rank:>6}  {best}".rstrip())
    return "\n".join(lines)
