"""Turns a GGUF file into a Hugging Face model directory, once, in the user's cache."""

from __future__ import annotations

from pathlib import Path

import xxhash

from tasuki.convert.draft import draft, locked, sweep
from tasuki.convert.manifest import matches_manifest, write_manifest
from tasuki.convert.random_llama import write_json
from tasuki.errors import ModelError

RECIPE = "gguf-3"  # change the number when the conversion changes
LOCK_SECONDS = 1800.0
_CHUNK = 16 << 20


def ensure_gguf(file: Path, cache_root: Path) -> Path:
    """The converted directory of a GGUF file, named after it and its content; made if need be.

    Raises ModelError for a file that is missing, damaged, or not supported.
    """
    if not file.is_file():
        raise ModelError(f"--model is {file}, which is no file")
    digest = _digest(file)
    directory = cache_root / "models" / f"{file.stem}-{digest[:12]}"
    recipe = f"{RECIPE} {digest}"
    if not matches_manifest(directory, recipe):
        with locked(directory, LOCK_SECONDS):
            sweep(directory)
            if not matches_manifest(directory, recipe):  # else somebody made it while we waited
                with draft(directory) as work:
                    convert(file, work)
                    write_manifest(work, recipe)
    return directory


def convert(source: Path, target: Path) -> None:
    """Write a Hugging Face model directory from the GGUF file into the existing `target`.

    One tensor is in memory at a time. Raises ModelError for what is not supported, or no room.
    """
    # Only a conversion needs these; a start that finds the model converted does without.
    from tasuki.convert.gguf_model import GgufModel
    from tasuki.convert.gguf_tokenizer import GgufTokenizer
    from tasuki.convert.safetensors_file import write_safetensors

    model = GgufModel(source)
    tokenizer = GgufTokenizer(model)
    tensors = model.tensors()
    tied = all(tensor.name != "lm_head.weight" for tensor in tensors)
    config = model.config(tied=tied, vocab_size=len(tokenizer.tokens))
    ids = tokenizer.ids()
    template = model.maybe("tokenizer.chat_template")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokenizer.special_tokens(),
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        **({} if template is None else {"chat_template": template}),
    }
    built = tokenizer.build()
    try:
        write_safetensors(target / "model.safetensors", tensors)
        write_json(target / "config.json", config | ids)
        write_json(target / "generation_config.json", ids)
        write_json(target / "tokenizer_config.json", tokenizer_config)
        (target / "tokenizer.json").write_text(built.to_str(pretty=True), encoding="utf-8")
    except OSError as error:
        raise ModelError(f"{target} cannot be written: {error.strerror}") from None


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_128()
    try:
        with file.open("rb") as content:
            while chunk := content.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from None
    return digest.hexdigest()
