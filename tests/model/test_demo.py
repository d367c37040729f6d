"""The demo model as it was converted: its tokenizer and its tokens against transformers'."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path

import pytest
import torch

from tasuki.model.config import ModelConfig
from tasuki.model.transformer import CausalLM
from tasuki.text.chat_template import ChatTemplate
from tasuki.text.detokenizer import IncrementalDetokenizer
from tasuki.text.tokenizer import Tokenizer
from tests.model.paged import Paged
from tests.model.reference import greedy

pytestmark = pytest.mark.demo

GOLDEN = json.loads((Path(__file__).parent / "golden_digits.json").read_text())
QUESTIONS = (
    "What is the capital of France?",
    "Count from 1 to 12.",
    "Write a line of Python that reverses a string.",
)


@pytest.fixture(scope="module")
def tokenizer(demo_directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(demo_directory)


def varied_strings(count: int) -> list[str]:
    """Words, digits, punctuation, spaces and scripts in every mixture, the same ones every time."""
    rng = random.Random(2024)
    words = [
        "the",
        "of",
        "Hello",
        "don't",
        "we'll",
        "I'VE",
        "naïve",
        "über",
        "Straße",
        "привет",
        "你好",
        "こんにちは",
        "مرحبا",
        "🙂",
        "👩\u200d💻",
        "é",
    ]
    marks = [
        " ",
        "  ",
        "\n",
        "\t",
        "\r\n",
        ".",
        ",",
        "!?",
        "...",
        "(",
        ")]",
        "#",
        "€",
        "\u00a0",
        "_",
    ]
    digits = "0123456789½²٣९"

    def piece() -> str:
        kind = rng.randrange(6)
        if kind < 2:
            return rng.choice(words)
        if kind == 2:
            return "".join(rng.choice(digits[:10]) for _ in range(rng.randint(1, 9)))
        if kind == 3:
            return rng.choice(digits) + rng.choice(words)
        if kind == 4:
            return chr(
                rng.choice([*range(32, 0x250), *range(0x370, 0x500), *range(0x4E00, 0x4F00)])
            )
        return rng.choice(marks)

    return ["".join(piece() for _ in range(rng.randint(1, 25))) for _ in range(count)]


def test_tokenizer_equals_transformers(demo_directory: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(demo_directory)
    assert theirs.is_fast
    for text in varied_strings(1000):
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text), text
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: ascii(golden["text"]))
def test_golden_digits(tokenizer: Tokenizer, golden: dict[str, object]) -> None:
    """Ids that a BPE written for this, with each digit split off, computed from the same merges."""
    text = str(golden["text"])
    ids = tokenizer.encode(text)
    assert ids == golden["ids"]
    numbers = [c for c in text if c.isascii() and unicodedata.category(c) == "Nd"]
    alone = [t for t in (tokenizer.decode([id_]) for id_ in ids) if t in numbers and t]
    assert alone == numbers  # every digit is a token, and no token holds two


def test_detokenizer(tokenizer: Tokenizer) -> None:
    for text in varied_strings(60):
        detokenizer = IncrementalDetokenizer(tokenizer)
        pieces = [detokenizer.push([id_]) for id_ in tokenizer.encode(text)]
        assert "".join([*pieces, detokenizer.finish()]) == text


def test_config(demo_directory: Path) -> None:
    config = ModelConfig.from_directory(demo_directory)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.rope.theta, config.rms_norm_eps, config.max_position) == (1e5, 1e-5, 8192)
    assert config.eos_token_ids == {2}
    assert config.kv_layout(16).block_bytes == 16 * 45 * 1024


def test_greedy_tokens_equal_transformers(demo_directory: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    template = ChatTemplate.from_directory(demo_directory)
    assert template is not None
    theirs = AutoTokenizer.from_pretrained(demo_directory)
    model = AutoModelForCausalLM.from_pretrained(demo_directory, dtype=torch.float32)
    paged = Paged(CausalLM.load(demo_directory), 20)
    answers: list[str] = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.encode(template.render(messages), add_special_tokens=False)
        rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert prompt == theirs.encode(rendered, add_special_tokens=False)
        run = paged.start(prompt, 20)
        paged.generate([run], 20)
        assert run.output == greedy(model, prompt, 20).tokens, question
        answers.append(tokenizer.decode(run.output))
    assert "Paris" in answers[0]
