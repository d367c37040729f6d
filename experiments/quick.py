"""The quick comparison: sixty real requests, replayed on two setups, one after the other.

It shows the mechanism at work and says itself that it proves nothing: one run per arm has no
interval. Starting and stopping clusters is its caller's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments.load import replay
from experiments.record import Record
from experiments.summary import Summary, summarise
from experiments.table import compare_table
from experiments.workload import DATA, ScheduledRequest, read_azure_trace, schedule
from tasuki.slo import Slo
from tasuki.text.tokenizer import Tokenizer

LENGTH_SCALE = 1 / 16  # of the trace, so that a small model on one core can follow
CAUTION = """\
One run of each setup on one small machine: it shows how each behaves, not which is better. The
difference may be chance, and a laptop's cores are shared with the router and the load generator."""


@dataclass(frozen=True)
class QuickComparison:
    """Fixed before anything runs: the same requests, at the same times, for every arm."""

    requests: list[ScheduledRequest]
    slo: Slo
    time_scale: float

    @classmethod
    def prepare(cls, model: Path, slo: Slo, *, time_scale: float, seed: int) -> QuickComparison:
        """Cut the prompts for the model at hand. Raises ModelError or ConfigError."""
        text = (DATA / "relay.txt").read_text(encoding="utf-8")
        tokens = Tokenizer.from_directory(model).encode(text)
        rows = read_azure_trace(DATA / "azure_conv_60.csv")
        requests = schedule(
            rows, tokens, length_scale=LENGTH_SCALE, time_scale=time_scale, seed=seed
        )
        return cls(requests, slo, time_scale)

    async def run_arm(self, router_address: str) -> list[Record]:
        """Replay the requests on a ready cluster."""
        return await replay(router_address, self.requests)

    def describe(self) -> str:
        """What will be replayed, in one line."""
        tokens_in = sum(len(request.prompt_token_ids) for request in self.requests)
        tokens_out = sum(request.max_tokens for request in self.requests)
        return (
            f"{len(self.requests)} requests of the Azure conversation trace over "
            f"{self.requests[-1].at:.0f} s (lengths x 1/16: {tokens_in} tokens in, {tokens_out} "
            f"out; times x {self.time_scale:g})"
        )

    def report(self, arms: Mapping[str, list[Record]]) -> str:
        summaries: dict[str, Summary] = {
            name: summarise(records, self.slo) for name, records in arms.items()
        }
        return compare_table(summaries, self.slo) + "\n\n" + CAUTION
