from __future__ import annotations

from pathlib import Path

import pytest

from experiments.workload import DATA, TraceRow, read_azure_trace, schedule
from tasuki.errors import ConfigError

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(path: Path, *rows: str) -> Path:
    path.write_text(HEADER + "".join(row + "\n" for row in rows))
    return path


def test_the_shipped_slice_has_sixty_rows() -> None:
    rows = read_azure_trace(DATA / "azure_conv_60.csv")
    assert len(rows) == 60
    assert rows[0].at == 0
    assert [row.at for row in rows] == sorted(row.at for row in rows)
    assert 9 < rows[-1].at < 11


def test_times_count_from_the_first_row(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.1805900,396,109",
    )
    assert read_azure_trace(path) == [TraceRow(0.0, 374, 44), TraceRow(3.5, 396, 109)]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("2023-11-16 18:15:46.68,x,44", "line 3"),
        ("2023-11-16 18:15:46.68,3", "line 3"),
        ("yesterday,3,4", "line 3"),
        ("2023-11-16 18:15:46.68,0,4", "positive token counts"),
        ("2023-11-15 18:15:46.68,3,4", "do not go back"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: str, words: str) -> None:
    path = write(tmp_path / "t.csv", "2023-11-16 18:15:46.6805900,374,44", row)
    with pytest.raises(ConfigError, match=words):
        read_azure_trace(path)


def test_an_empty_or_foreign_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no rows"):
        read_azure_trace(write(tmp_path / "t.csv"))
    (tmp_path / "u.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="expected the columns"):
        read_azure_trace(tmp_path / "u.csv")


def test_a_schedule_is_scaled_and_repeats_with_its_seed() -> None:
    rows = [TraceRow(0.0, 160, 32), TraceRow(2.0, 1, 1), TraceRow(3.0, 1600, 16)]
    made = schedule(rows, range(50), length_scale=1 / 16, time_scale=3.0, seed=1)
    assert [request.at for request in made] == [0.0, 6.0, 9.0]
    assert [len(request.prompt_token_ids) for request in made] == [10, 1, 100]
    assert [request.max_tokens for request in made] == [2, 1, 1]
    assert made == schedule(rows, range(50), length_scale=1 / 16, time_scale=3.0, seed=1)
    assert made != schedule(rows, range(50), length_scale=1 / 16, time_scale=3.0, seed=2)
