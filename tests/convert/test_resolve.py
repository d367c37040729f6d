"""What --model may be: a directory, a GGUF file, a name on a hub; and how each can fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from router.served_model import ServedModel
from tasuki.convert.resolve import resolve_model
from tasuki.convert.tiny import make_tiny
from tasuki.errors import ModelError
from tasuki.model.config import ModelConfig
from tests.convert.fake_hub import FakeHub, serving
from tests.convert.gguf_files import original, write_gguf

NAME = "some/small.model"


def test_paths_go_first(tmp_path: Path) -> None:
    directory = tmp_path / "some" / "model"
    directory.mkdir(parents=True)
    assert resolve_model(str(directory)) == directory
    with pytest.raises(ModelError, match="which is no file"):
        resolve_model(str(tmp_path / "nothing.gguf"))
    with pytest.raises(ModelError, match=r"a model directory, a \.gguf file, or owner/name"):
        resolve_model(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "--model is empty; expected a model directory"),
        ("x" * 5000, "no path: .*too long"),
        ("x" * 5000 + ".gguf", "no path: .*too long"),
        ("~nobody-of-this-name/model", "no path: .*home"),
        ("a\0b", "does not exist"),
    ],
)
def test_what_is_no_path_is_one_short_error(text: str, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        resolve_model(text)
    assert len(caught.value.message) <= 400


def test_a_gguf_file_is_a_model(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "small.gguf", original(tmp_path / "original"))
    found = resolve_model(str(file), {"TASUKI_CACHE": str(tmp_path / "cache")})
    assert found.parent == tmp_path / "cache" / "models"


# --- without a hub ------------------------------------------------------------------------------


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache as huggingface_hub lays it out, with one model, and no network."""
    import huggingface_hub.constants as constants

    repository = tmp_path / "hub" / "models--some--small.model"
    snapshot = repository / "snapshots" / ("a" * 40)
    original(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot


def test_a_model_in_the_hubs_cache_is_found_by_its_name(hub_cache: Path) -> None:
    assert resolve_model(NAME) == hub_cache
    assert resolve_model(NAME, weights=False) == hub_cache
    assert ModelConfig.from_directory(hub_cache).model_id == NAME


def test_a_model_that_no_hub_has_is_one_clear_error(hub_cache: Path) -> None:
    with pytest.raises(ModelError, match="no hub can be reached"):
        resolve_model("some/other")
    (hub_cache / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(NAME)


# --- with one -----------------------------------------------------------------------------------

TEXTS = {"config.json", "tokenizer.json", "tokenizer_config.json", "tasuki-manifest.json"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Beside the model, what other programs take: other weights, pickles, folders."""
    import huggingface_hub.constants as constants

    directory = make_tiny(tmp_path / "served")
    for name in ("consolidated.safetensors", "pytorch_model.bin", "onnx/config.json", "README.md"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(b"never asked for")
    with serving(FakeHub(NAME, directory)) as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield served


def test_a_model_is_downloaded_once_and_no_more_than_is_needed(hub: FakeHub) -> None:
    directory = resolve_model(NAME)
    assert set(hub.served) == TEXTS | {"model.safetensors"}
    hub.served.clear()
    assert resolve_model(NAME) == directory
    assert not hub.served
    weights = (directory / "model.safetensors").read_bytes()
    assert weights == (hub.directory / "model.safetensors").read_bytes()


def test_a_router_does_without_weights(hub: FakeHub) -> None:
    assert ServedModel.from_directory(NAME).model_id == NAME
    assert set(hub.served) == TEXTS
    resolve_model(NAME)  # a worker on the same machine fetches the rest
    assert hub.served[len(TEXTS) :] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("unknown", "the hub does not give model .*; check the name, and HF_TOKEN"),
        ("nonsense", "cannot be had from a hub .*; try again"),
    ],
)
def test_a_hub_that_fails_is_one_clear_error(hub: FakeHub, behaviour: str, words: str) -> None:
    hub.behaviour = behaviour
    with pytest.raises(ModelError, match=words):
        resolve_model(NAME)
    hub.behaviour = "fine"
    assert (resolve_model(NAME) / "model.safetensors").is_file()
