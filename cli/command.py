"""What one subcommand of `tasuki` is made of. Knows no particular subcommand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Command:
    """One subcommand: its words for `--help`, its settings, and what it does.

    `config` is a dataclass of `tasuki.config.setting` fields; `run` takes an instance of it and
    returns the exit code. `positional` names the one setting that may be given without its flag.
    """

    name: str
    summary: str
    help: str
    config: type[Any]
    run: Callable[[Any], int]
    positional: str | None = None
