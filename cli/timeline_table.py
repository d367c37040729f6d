"""Where the time of one request went, as a small table. Pure: takes a last output, returns text."""

from __future__ import annotations

from tasuki.client import GenerateOutput, Placement, Timings

# Parts of the time to the first token, in the order in which they happen; hop is the residual.
TTFT_PARTS = (
    ("queue", "router queue"),
    ("reservation", "reservation wait"),
    ("prefill_queue", "prefill queue"),
    ("prefill_compute", "prefill compute"),
    ("fallback", "lost on a fallback"),
    ("hop", "hops between processes"),
)
SECOND_TOKEN_PARTS = (
    ("exposed_transfer", "exposed transfer"),
    ("commit_wait", "commit wait"),
    ("first_decode", "first decode step"),
)
LABEL = 25
NUMBER = 10


def render(last: GenerateOutput) -> str:
    """The timeline of a finished request, from its last output. Times are shown in milliseconds."""
    timings, usage, placement = last.timings, last.usage, last.placement
    if timings is None or usage is None:
        return "(the cluster sent no timeline)"
    blocks = [_ttft(timings)]
    if usage.completion_tokens > 1:
        blocks.append(_second_token(timings))
    blocks.append(_rest(timings, usage.completion_tokens))
    blocks.append(_counts(last))
    if placement is not None:
        blocks.append(_placement(placement))
    return "\n".join(line for block in blocks for line in block)


def _ttft(timings: Timings) -> list[str]:
    total = _hundredths(timings.ttft)
    shown = {name: _hundredths(getattr(timings, name)) for name, _ in TTFT_PARTS}
    # Rounding must not make the column look wrong: hop is the residual here as well.
    shown["hop"] = total - sum(value for name, value in shown.items() if name != "hop")
    lines = [_line("time to first token", total)]
    for name, label in TTFT_PARTS:
        percent = f"{100 * shown[name] / total:5.1f} %" if total else ""
        lines.append(f"{_line('  ' + label, shown[name])} {percent}".rstrip())
    return lines


def _second_token(timings: Timings) -> list[str]:
    shown = [(label, _hundredths(getattr(timings, name))) for name, label in SECOND_TOKEN_PARTS]
    lines = [_line("then to the second token", sum(value for _, value in shown))]
    return lines + [_line("  " + label, value) for label, value in shown]


def _rest(timings: Timings, tokens: int) -> list[str]:
    lines = []
    if timings.transfer_bytes:
        lines.append(_line("KV transfer", _hundredths(timings.transfer)) + _transfer(timings))
    if tokens > 1:
        line = _line("time per output token", _hundredths(timings.tpot))
        rate = f"  {1 / timings.tpot:.1f} tokens/s after the first" if timings.tpot > 0 else ""
        lines.append(line + rate)
    lines.append(_line("whole request", _hundredths(timings.e2e)))
    return lines


def _transfer(timings: Timings) -> str:
    amount = f"  {timings.transfer_bytes / 1e6:.2f} MB in {timings.transfer_blocks} blocks"
    if timings.transfer <= 0:
        return amount
    return f"{amount}, {timings.transfer_bytes / timings.transfer / 1e9:.2f} GB/s"


def _which_stop(last: GenerateOutput) -> str:
    if last.stop_reason is None:
        return ""
    kind = "" if isinstance(last.stop_reason, str) else "token "
    return f" ({kind}{last.stop_reason!r})"


def _counts(last: GenerateOutput) -> list[str]:
    assert last.usage is not None, "render has looked"
    usage = last.usage
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    lines = [
        f"tokens: {usage.prompt_tokens} in{cached}, {usage.completion_tokens} out, "
        f"ended by {last.finish_reason or 'nothing'}{_which_stop(last)}"
    ]
    if last.timings is not None and last.timings.slo_result:
        lines.append(f"objective: {last.timings.slo_result}")
    return lines


def _placement(placement: Placement) -> list[str]:
    workers = [placement.prefill_worker_id, placement.decode_worker_id]
    path = " -> ".join(worker for worker in workers if worker)
    lines = [f"placement: {placement.kind} ({placement.reason}), {path}"]
    if placement.fallback_reason:
        count = placement.decode_computed_prompt_tokens
        lines.append(
            f"fallback: {placement.fallback_reason}; "
            f"the decode worker computed {count} prompt tokens itself"
        )
    return lines


def _hundredths(seconds: float) -> int:
    """Hundredths of a millisecond, as a whole number, so that sums are exact."""
    return round(seconds * 100_000)


def _line(label: str, hundredths: int) -> str:
    return f"{label:<{LABEL}}{hundredths / 100:>{NUMBER}.2f} ms"
