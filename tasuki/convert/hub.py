"""A model by its name on a hub, `owner/name`: downloaded, or found in the local hub cache.

Where files come from and are kept is huggingface_hub's affair (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE); only what is needed is asked for, and never a pickle.
"""

from __future__ import annotations

import re
from pathlib import Path

from tasuki.errors import ModelError

NAME = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}")
TEXTS = ("*.json", "*.jinja")  # config, tokenizer, chat template
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
# Other forms of the same model: for other programs in folders, and in Mistral's own layout.
UNWANTED = ("*/*", "consolidated*.safetensors")


def is_hub_name(text: str) -> bool:
    return NAME.fullmatch(text) is not None


def ensure_hub_model(name: str, *, weights: bool = True) -> Path:
    """The directory of a model's files; without its weights when they are not wanted.

    Raises ModelError saying what was tried.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = [*TEXTS, *(WEIGHTS if weights else ())]
    try:
        directory = Path(
            snapshot_download(name, allow_patterns=wanted, ignore_patterns=list(UNWANTED))
        )
    except LocalEntryNotFoundError as error:
        reason = _short(error.__cause__ or "offline")
        raise ModelError(
            f"model {name} is neither a directory here nor in the local hub cache, and no hub can "
            f"be reached ({reason}); check the network and HF_HUB_OFFLINE, or give a model "
            "directory"
        ) from None
    except HfHubHTTPError as error:
        raise ModelError(
            f"the hub does not give model {name} ({_short(error)}); check the name, and HF_TOKEN "
            "for a gated one"
        ) from None
    except Exception as error:  # a connection that breaks, or an answer that is none, is anything
        raise ModelError(
            f"model {name} cannot be had from a hub ({type(error).__name__}: {_short(error)}); "
            "try again, or give a model directory"
        ) from None
    if not (directory / "config.json").is_file():
        raise ModelError(f"model {name} was found on a hub, but has no config.json")
    return directory


def _short(error: object) -> str:
    return " ".join(str(error).split())[:200]
