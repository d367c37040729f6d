"""What is asked of a cluster, and when: arrivals and prompts, fixed before a run begins.

Free of I/O apart from reading the files it is given. Times are seconds from the start of the run.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tasuki.errors import ConfigError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class TraceRow:
    at: float
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class ScheduledRequest:
    """One request of a run. The same list is replayed on every arm."""

    index: int
    at: float
    prompt_token_ids: list[int]
    max_tokens: int


def read_azure_trace(path: Path) -> list[TraceRow]:
    """Rows of an Azure LLM inference trace, times counted from its first row.

    Raises ConfigError naming the line that cannot be read.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        header = next(reader, None)
        if header is None or tuple(header) != COLUMNS:
            raise ConfigError(f"{path} starts with {header}; expected the columns {COLUMNS}")
        rows: list[TraceRow] = []
        start: datetime | None = None
        for number, row in enumerate(reader, start=2):
            try:
                when = datetime.fromisoformat(row[0][:26])
                tokens_in, tokens_out = int(row[1]), int(row[2])
            except (ValueError, IndexError) as error:
                raise ConfigError(f"{path} line {number} is {row}: {error}") from None
            start = start or when
            at = (when - start).total_seconds()
            if tokens_in < 1 or tokens_out < 1 or (rows and at < rows[-1].at):
                raise ConfigError(
                    f"{path} line {number} is {row}; expected positive token counts and times "
                    "that do not go back"
                )
            rows.append(TraceRow(at, tokens_in, tokens_out))
    if not rows:
        raise ConfigError(f"{path} has no rows")
    return rows


def schedule(
    rows: Sequence[TraceRow],
    text_token_ids: Sequence[int],
    *,
    length_scale: float,
    time_scale: float,
    seed: int,
) -> list[ScheduledRequest]:
    """Turn trace rows into requests: lengths times `length_scale`, times times `time_scale`.

    Each prompt is a stretch of the text at a place drawn from `seed`; the text repeats if it must.
    """
    rng = random.Random(seed)
    text = list(text_token_ids)
    requests = []
    for index, row in enumerate(rows):
        length = max(1, round(row.input_tokens * length_scale))
        start = rng.randrange(len(text))
        repeats = -(-(start + length) // len(text))
        prompt = (text * repeats)[start : start + length]
        tokens_out = max(1, round(row.output_tokens * length_scale))
        requests.append(ScheduledRequest(index, row.at * time_scale, prompt, tokens_out))
    return requests
