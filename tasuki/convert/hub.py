"""A model by its name on a hub, `owner/name`: downloaded, or found in the local hub cache.

Where files come from and are kept is huggingface_hub's affair (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE); only what is needed is asked for, and never a pickle.
"""

from __future__ import annotations

import re
from pathlib import Path

from tasuki.errors import ModelError

NAME = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}")
WANTED = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja")


def is_hub_name(text: str) -> bool:
    return NAME.fullmatch(text) is not None


def ensure_hub_model(name: str) -> Path:
    """The directory of a model's files. Raises ModelError saying what was tried."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        directory = Path(snapshot_download(name, allow_patterns=list(WANTED)))
    except LocalEntryNotFoundError:
        raise ModelError(
            f"model {name} is neither a directory here nor in the local hub cache, and no hub can "
            "be reached; check the network and HF_HUB_OFFLINE, or give a model directory"
        ) from None
    except HfHubHTTPError as error:
        raise ModelError(
            f"the hub does not give model {name} ({' '.join(str(error).split())[:200]}); check the "
            "name, and HF_TOKEN for a gated one"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"model {name} cannot be had from a hub: {error}") from None
    if not (directory / "config.json").is_file():
        raise ModelError(f"model {name} was found on a hub, but has no config.json")
    return directory
