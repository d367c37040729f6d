"""Rows of a result as a Markdown table. Knows nothing about what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.rounds import Spread


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def with_range(spread: Spread) -> str:
    """A median with the smallest and the largest beside it."""
    return f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"
