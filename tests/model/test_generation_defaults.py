"""What generation_config.json recommends, and what in it can be no recommendation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasuki.errors import ModelError
from tasuki.messages import SamplingParams
from tasuki.model.generation_defaults import generation_defaults


def read(folder: Path, **values: Any) -> SamplingParams:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return generation_defaults(folder)


def test_no_file_means_greedy(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path) == SamplingParams()


def test_what_is_recommended(tmp_path: Path) -> None:
    found = read(
        tmp_path, do_sample=True, temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05,
        eos_token_id=[1, 2], max_length=5,
    )  # fmt: skip
    assert found == SamplingParams(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05)
    assert read(tmp_path, do_sample=True, top_k=0) == SamplingParams(temperature=1.0)


def test_without_do_sample_only_the_penalty_counts(tmp_path: Path) -> None:
    found = read(tmp_path, temperature=0.6, top_p=0.9, repetition_penalty=1.2)
    assert found == SamplingParams(repetition_penalty=1.2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": True}, "top_p"),
        ({"top_k": 2.5}, "top_k"),
        ({"min_p": 1.0}, "min_p"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 1e9}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 10**400}, "top_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"do_sample": 1}, "do_sample"),
    ],
)
def test_nonsense_is_named(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read(tmp_path, **{"do_sample": True, **values})
