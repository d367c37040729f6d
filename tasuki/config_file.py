"""One YAML file with the settings of every process of a cluster, and what a process takes from it.

Sections are `router`, `prefill`, `decode`, `worker` (both roles; a role's own section wins) and
`up`. Knows nothing about what settings mean: `tasuki.config` converts and checks them.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tasuki.errors import ConfigError

SECTIONS = ("router", "worker", "prefill", "decode", "up")
MAX_BYTES = 1 << 20
SCALARS = (str, int, float, bool)


@dataclasses.dataclass(frozen=True)
class FileValue:
    """A setting as it stands in the file, and where, for messages."""

    value: Any
    source: str
    section: str


class ConfigFile:
    """Read once; raises ConfigError naming the file, the section and the key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sections = _read(path)

    def values(self, cls: type[Any], *sections: str) -> dict[str, FileValue]:
        """The settings of `cls` in these sections; the later ones win.

        Raises ConfigError for a key that `cls` does not have.
        """
        known = [field.name for field in dataclasses.fields(cls) if not _is_private(field.name)]
        found: dict[str, FileValue] = {}
        for section in sections:
            for key, value in self._sections.get(section, {}).items():
                name = key.replace("-", "_")
                if name not in known:
                    raise ConfigError(
                        f"{self.path} has {section}.{key}, which is no setting{_hint(name, known)}"
                    )
                if name in found and found[name].section == section:
                    raise ConfigError(
                        f"{self.path} has {section}.{key} twice, with dashes and with underscores"
                    )
                found[name] = FileValue(value, f"{section}.{key} in {self.path}", section)
        return found


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path} has over {MAX_BYTES} bytes; expected a short YAML file")
    try:
        whole = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError) as error:
        # the other four: a tag such as !!int before something that is none
        raise ConfigError(f"{path} is no valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; expected sections of settings") from None
    return {name: _section(path, name, section) for name, section in _mapping(path, whole).items()}


def _mapping(path: Path, whole: Any) -> Mapping[Any, Any]:
    if whole is None:
        return {}
    if not isinstance(whole, dict):
        raise ConfigError(
            f"{path} holds a {type(whole).__name__}; expected sections: {', '.join(SECTIONS)}"
        )
    return whole


def _section(path: Path, name: Any, section: Any) -> dict[str, Any]:
    if name not in SECTIONS:
        hint = _hint(str(name), SECTIONS)
        raise ConfigError(
            f"{path} has a section {str(name)[:60]!r}{hint}; expected {', '.join(SECTIONS)}"
        )
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise ConfigError(f"{path} has no settings under {name}; expected lines such as port: 0")
    for key, value in section.items():
        if not isinstance(key, str) or not isinstance(value, SCALARS):
            raise ConfigError(
                f"{path} has {name}.{str(key)[:60]} = {str(value)[:60]!r}; expected a name and a "
                "single value"
            )
    return section


def _is_private(name: str) -> bool:
    """Descriptors are from a parent to its child, and a file does not name another file."""
    return name == "config" or name.endswith("_fd")


def _hint(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


class _Loader(yaml.SafeLoader):
    """Plain data only; without aliases, which can grow without end, and with each key once."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not taken; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"expected a name before the colon, {key.start_mark}")
            if key.value in seen:
                raise yaml.YAMLError(f"{key.value!r} stands twice, {key.start_mark}")
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)
