"""Entry point of `tasuki`: finds the subcommand, loads its settings, turns errors into exit codes.

Exit codes: 0 done, 1 failed, 2 used wrongly, 130 interrupted, 141 nobody reads the output any more.
Never imports torch: what needs it runs in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from cli.chaos import CHAOS
from cli.command import Command
from cli.compare import COMPARE
from cli.generate import GENERATE
from cli.say import say
from cli.status import STATUS
from cli.up import UP
from tasuki import __version__
from tasuki.config import add_flags, build, flag_name, open_config_file
from tasuki.errors import ConfigError, TasukiError

# A new subcommand is one more name here.
COMMANDS: tuple[Command, ...] = (UP, GENERATE, STATUS, COMPARE, CHAOS)

HELP = """\
tasuki serves a language model with prefill and decode in separate processes: one worker computes
the prompt, hands its KV cache to another, and that one generates.

  tasuki up                        start a router, a prefill worker and a decode worker here
  tasuki generate "Why is the sky blue?"
                                   ask it, and see where the time to the first token went
  tasuki status                    its workers, and whether results are exact to the bit
  tasuki up --colocated 2          the same without a prefill worker
  tasuki compare --quick           replay real requests on both, and see the difference
  tasuki chaos                     kill, stop and cut it under load: no token may be lost

Every flag is also an environment variable: --max-tokens is TASUKI_MAX_TOKENS. A flag wins.
"""

INTERRUPTED = 130
BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None, commands: Sequence[Command] = COMMANDS) -> int:
    """Run one command line; returns the exit code."""
    parser = _parser(commands)
    given = vars(parser.parse_args(argv))
    command: Command | None = given.pop("command", None)
    if command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return run(command, given)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone, as `| head` does
        _leave_stdout_alone()
        return BROKEN_PIPE


def run(command: Command, given: dict[str, Any]) -> int:
    """Build the command's settings and run it. Errors become one line on stderr."""
    try:
        file = open_config_file(given.get("config")) if "config" in given else None
        values = file.values(command.config, command.name) if file else {}
        code = command.run(build(command.config, _with_positional(command, given), file=values))
        sys.stdout.flush()
        return code
    except ConfigError as error:
        say(f"tasuki {command.name}: {error.message}")
        say(f"`tasuki {command.name} --help` lists the settings.")
        return 2
    except TasukiError as error:
        say(f"tasuki {command.name}: {error.message}")
        return 1


def _parser(commands: Sequence[Command]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tasuki", description=HELP, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"tasuki {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in commands:
        sub = subparsers.add_parser(
            command.name, help=command.summary, description=command.help, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        if command.positional is not None:
            sub.add_argument(
                "positional", nargs="?", default=None, metavar=command.positional.upper(),
                help=f"The same as {flag_name(command.positional)}.",
            )  # fmt: skip
        add_flags(sub, command.config)
        sub.set_defaults(command=command)
    return parser


def _with_positional(command: Command, given: dict[str, Any]) -> dict[str, Any]:
    """Fold the bare argument into the setting that it stands for."""
    bare = given.pop("positional", None)
    if command.positional is None or bare is None:
        return given
    if given.get(command.positional) is not None:
        flag = flag_name(command.positional)
        raise ConfigError(f"{bare!r} and {flag} are both given; expected one of them")
    return given | {command.positional: bare}


def _leave_stdout_alone() -> None:
    """Keep the interpreter from flushing into the closed pipe, and complaining, when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
