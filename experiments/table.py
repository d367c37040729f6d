"""Two summaries side by side, as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.summary import Percentiles, Summary
from tasuki.slo import Slo


def compare_table(arms: Mapping[str, Summary], slo: Slo) -> str:
    """One column per arm. Times in milliseconds."""
    names = list(arms)
    rows = [("", *names)]

    def row(label: str, *cells: str) -> None:
        rows.append((label, *cells))

    summaries = [arms[name] for name in names]
    row("requests (completed)", *(f"{s.requests} ({s.completed})" for s in summaries))
    row("output tokens/s", *(f"{s.tokens_out / s.duration:.1f}" for s in summaries))
    row("TTFT p50 / p95 / p99, ms", *(_milliseconds(s.ttft) for s in summaries))
    row("TPOT p50 / p95 / p99, ms", *(_milliseconds(s.tpot) for s in summaries))
    row("KV transfer p50 / p95 / p99, ms", *(_milliseconds(s.transfer) for s in summaries))
    row("KV transferred, MiB", *(f"{s.transfer_bytes / 2**20:.1f}" for s in summaries))
    row("attainment", *(f"{100 * s.attainment:.0f} %" for s in summaries))
    row("goodput, good requests/s", *(f"{s.goodput:.2f}" for s in summaries))
    for name in sorted({name for s in summaries for name in s.placements}):
        row(f"placed {name}", *(str(s.placements.get(name, 0)) for s in summaries))
    for name in sorted({name for s in summaries for name in s.fallbacks}):
        row(f"fallback {name}", *(str(s.fallbacks.get(name, 0)) for s in summaries))
    row("send lag p99, ms", *(f"{1000 * s.send_lag_p99:.1f}" for s in summaries))
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in rows
    ]
    objective = f"objective: TTFT {1000 * slo.ttft:.0f} ms, TPOT {1000 * slo.tpot:.0f} ms"
    return "\n".join([*lines, objective])


def _milliseconds(values: Percentiles | None) -> str:
    if values is None:
        return "-"
    return f"{1000 * values.p50:.1f} / {1000 * values.p95:.1f} / {1000 * values.p99:.1f}"
