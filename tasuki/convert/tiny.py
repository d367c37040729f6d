"""The model `tiny`: random weights and a byte tokenizer, made from a seed in well under a second.

It says nothing sensible, but it runs everywhere at once, and its streams are different for every
prompt.
"""

from __future__ import annotations

from pathlib import Path

from tasuki.convert.byte_tokenizer import (
    BOS_ID,
    EOS_ID,
    TURN_END_ID,
    VOCAB_SIZE,
    write_byte_tokenizer,
)
from tasuki.convert.draft import draft, locked
from tasuki.convert.manifest import matches_manifest, write_manifest
from tasuki.convert.random_llama import RandomLlama, make_random_llama

RECIPE = "tiny-2"  # change it when the bytes change, so that an old copy is made anew
LOCK_SECONDS = 60.0
SPEC = RandomLlama(
    vocab_size=VOCAB_SIZE,
    hidden_size=96,  # with 64, greedy streams repeat themselves too much to show a wrong block
    bos_token_id=BOS_ID,
    eos_token_ids=(EOS_ID, TURN_END_ID),
)


def make_tiny(directory: Path, *, seed: int = 0, spec: RandomLlama = SPEC) -> Path:
    """Write the whole model directory, replacing what is there. Returns `directory`."""
    with draft(directory) as work:
        make_random_llama(work, spec, seed=seed)
        write_byte_tokenizer(work)
        write_manifest(work, f"{RECIPE} seed {seed}")
    return directory


def tiny_directory(cache_root: Path) -> Path:
    return cache_root / "models" / "tiny"


def ensure_tiny(cache_root: Path) -> Path:
    """The directory of `tiny` in the cache, made if it is not there or not as it was written."""
    directory = tiny_directory(cache_root)
    recipe = f"{RECIPE} seed 0"
    if not matches_manifest(directory, recipe):
        with locked(directory, LOCK_SECONDS):
            if not matches_manifest(directory, recipe):
                make_tiny(directory)
    return directory
