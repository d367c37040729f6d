"""The tiny model: the same bytes every time, loadable here and by transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tasuki.convert.byte_tokenizer import VOCAB_SIZE
from tasuki.convert.manifest import NAME
from tasuki.convert.random_llama import RandomLlama, make_random_llama
from tasuki.convert.tiny import ensure_tiny, make_tiny
from tasuki.model.config import ModelConfig
from tasuki.model.transformer import CausalLM
from tests.model.paged import Paged

PINNED_RECIPE = "tiny-2 seed 0"
PINNED_SHA256 = "ad0fa90f796d0e992d50a72ca345b18255674015e67beb4e8c61ca546d85e6d8"
ROOT = Path(__file__).resolve().parents[2]


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_the_same_bytes_every_time(tmp_path: Path) -> None:
    first, again = make_tiny(tmp_path / "a"), make_tiny(tmp_path / "b")
    assert contents(first) == contents(again)
    other = make_tiny(tmp_path / "c", seed=1)
    assert contents(first)["model.safetensors"] != contents(other)["model.safetensors"]


def test_the_bytes_are_pinned(tmp_path: Path) -> None:
    """Workers on two machines each make their own; change RECIPE together with this."""
    manifest = json.loads((make_tiny(tmp_path / "a") / NAME).read_text())
    assert manifest["recipe"] == PINNED_RECIPE
    assert manifest["files"]["model.safetensors"]["sha256"] == PINNED_SHA256


def test_what_it_is(tmp_path: Path) -> None:
    config = ModelConfig.from_directory(make_tiny(tmp_path / "tiny"))
    assert (config.model_id, config.vocab_size, config.max_position) == ("tiny", VOCAB_SIZE, 2048)
    assert (config.num_heads, config.num_kv_heads) == (4, 2)
    assert config.eos_token_ids == {257, 259}


@pytest.mark.parametrize("length", [1, 40, 333])
def test_streams_are_varied_and_those_of_transformers(tmp_path: Path, length: int) -> None:
    from transformers import AutoModelForCausalLM

    from tests.model.reference import greedy

    directory = make_tiny(tmp_path / "tiny")
    prompt = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    paged = Paged(CausalLM.load(directory), 40)
    run = paged.start(prompt, 64)
    paged.generate([run], 64)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert run.output == greedy(theirs, prompt, 64).tokens
    assert len(set(run.output)) >= 30


def test_ensure_makes_it_once_and_repairs_it(tmp_path: Path) -> None:
    directory = ensure_tiny(tmp_path)
    made = (directory / "config.json").stat().st_mtime_ns
    assert ensure_tiny(tmp_path) == directory
    assert (directory / "config.json").stat().st_mtime_ns == made
    good = contents(directory)
    with (directory / "model.safetensors").open("r+b") as file:
        file.seek(5000)
        file.write(b"\x01\x02\x03\x04")
    ensure_tiny(tmp_path)
    assert contents(directory) == good
    (directory / "tokenizer.json").unlink()
    ensure_tiny(tmp_path)
    assert contents(directory) == good


def test_making_it_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tasuki.convert.tiny import ensure_tiny; "
        "import tasuki.convert.demo; import tasuki.convert.gguf_tokenizer; "
        "from tasuki.text.chat_template import ChatTemplate; "
        "from tasuki.text.tokenizer import Tokenizer; "
        "from tasuki.text.detokenizer import IncrementalDetokenizer; "
        "from tasuki.model.config import ModelConfig; "
        "path = ensure_tiny(Path(sys.argv[1])); ModelConfig.from_directory(path); "
        "Tokenizer.from_directory(path); ChatTemplate.from_directory(path); "
        "sys.exit('torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.run(command, env=environment, timeout=60, check=False).returncode == 0


def test_other_sizes(tmp_path: Path) -> None:
    spec = RandomLlama(
        vocab_size=300, hidden_size=48, num_layers=1, num_heads=3, num_kv_heads=1, head_dim=8,
        tie_word_embeddings=True, eos_token_ids=(7,),
    )  # fmt: skip
    make_random_llama(tmp_path, spec)
    config = CausalLM.load(tmp_path).config
    assert (config.vocab_size, config.num_layers, config.head_dim) == (300, 1, 8)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == {7}
