"""Turns a GGUF file into a Hugging Face model directory, once, in the user's cache."""

from __future__ import annotations

from pathlib import Path

import xxhash

from tasuki.convert.draft import draft, locked
from tasuki.convert.manifest import matches_manifest, write_manifest
from tasuki.convert.random_llama import write_json
from tasuki.errors import ModelError

RECIPE = "gguf-1"  # change the number when the conversion changes
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
            if not matches_manifest(directory, recipe):  # else somebody made it while we waited
                with draft(directory) as work:
                    convert(file, work)
                    write_manifest(work, recipe)
    return directory


def convert(source: Path, target: Path) -> None:
    """Write a Hugging Face model directory from the GGUF file into the existing `target`."""
    # Only a conversion needs these; a start that finds the model converted does without.
    from safetensors.numpy import save_file

    from tasuki.convert.gguf_model import GgufModel
    from tasuki.convert.gguf_tokenizer import read_tokenizer

    model = GgufModel(source)
    tokenizer = read_tokenizer(model)
    tensors = dict(model.tensors())
    tokens: list[str] = model.value("tokenizer.ggml.tokens")
    config = model.config(tied="lm_head.weight" not in tensors, vocab_size=len(tokens))
    ids = {
        f"{name}_token_id": int(found)
        for name in ("bos", "eos")
        if (found := model.maybe(f"tokenizer.ggml.{name}_token_id")) is not None
    }
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    write_json(target / "config.json", config | ids)
    write_json(target / "generation_config.json", ids)
    tokenizer.save(str(target / "tokenizer.json"))
    named = {f"{name.removesuffix('_id')}": tokens[id_] for name, id_ in ids.items()}
    template = model.maybe("tokenizer.chat_template")
    write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **named,
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(model.own("context_length")),
            **({} if template is None else {"chat_template": template}),
        },
    )


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_128()
    try:
        with file.open("rb") as content:
            while chunk := content.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from None
    return digest.hexdigest()
