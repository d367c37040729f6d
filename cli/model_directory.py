"""Turns `--model` into a directory: makes or obtains what is none in a process of its own.

Conversion needs torch and may take a minute; a separate process keeps both out of this one, and can
be ended at any moment, for it puts a finished directory in place by one rename.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from cli.cluster.cluster_spec import ClusterSpec, module_program
from cli.cluster.lifeline import Lifeline
from cli.cluster.process_group import end_group
from cli.say import say
from tasuki.clock import monotonic
from tasuki.errors import ModelError

MAKE_TIMEOUT = 900.0
OBTAIN_TIMEOUT = 4 * 3600.0  # a model of any size over any network, converted
PROGRESS_SECONDS = 10.0
MOST_OF_A_LINE = 64 << 10
KILL_TIMEOUT = 5.0
NAMED = ("demo", "tiny")


async def obtain_model(choice: str, program: Sequence[str] | None = None) -> Path:
    """The directory for auto, demo, tiny, a path or a hub name. Says on stderr what takes long.

    `program` is the command that converts. Raises ModelError when there is no such model.
    """
    convert = program or module_program("tasuki.convert")
    if choice != "auto":
        named = choice in NAMED or not is_directory(choice)
        return await _convert(choice, convert) if named else check_directory(Path(choice))
    try:
        return await _convert("demo", convert)
    except ModelError as error:
        say(f"{error.message}")
        say("Using the tiny random model instead: it runs the same path, but its text is noise.")
        return await _convert("tiny", convert)


def is_directory(text: str) -> bool:
    return Path(text).expanduser().is_dir()


def check_directory(path: Path) -> Path:
    """A first look, so that a wrong path is one clear line. Raises ModelError."""
    path = path.expanduser().absolute()
    if not path.exists():
        raise ModelError(
            f"--model is {path}, which does not exist; "
            "expected auto, demo, tiny, a model directory, a .gguf file, or owner/name on a hub"
        )
    if not (path / "config.json").is_file():
        raise ModelError(
            f"--model is {path}, which is no model directory: it holds no config.json; expected a "
            "Hugging Face directory with config.json, tokenizer.json and *.safetensors"
        )
    return path


async def _convert(name: str, program: Sequence[str]) -> Path:
    lifeline = Lifeline()
    seconds = MAKE_TIMEOUT if name in NAMED else OBTAIN_TIMEOUT
    try:
        process = await asyncio.create_subprocess_exec(
            *program,
            f"--lifeline-fd={lifeline.read_fd}",
            "--",
            name,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=ClusterSpec(model=Path()).environment() | {"OMP_NUM_THREADS": str(os.cpu_count())},
            pass_fds=(lifeline.read_fd,),
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(seconds):
                return await _directory_from(name, process)
        except TimeoutError:
            raise ModelError(
                f"model {name} was not there after {seconds:g} s; try again, or give --model tiny"
            ) from None
        finally:
            await end_group(process.pid, KILL_TIMEOUT)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.communicate(), KILL_TIMEOUT)
    finally:
        lifeline.close()


async def _directory_from(name: str, process: asyncio.subprocess.Process) -> Path:
    assert process.stdout is not None, "asked for a pipe"
    assert process.stderr is not None, "asked for a pipe"
    # Both at once, or a full pipe on one side would stop the child while we wait on the other.
    output, last = await asyncio.gather(process.stdout.read(), _relay(process.stderr))
    code = await process.wait()
    lines = output.decode(errors="replace").split("\n")
    path = next((line for line in reversed(lines) if line.strip()), "")
    if code != 0 or not path:
        raise ModelError(f"model {name} cannot be had: {last or f'conversion exited with {code}'}")
    if last:
        say(last)
    return check_directory(Path(path))


async def _relay(stream: asyncio.StreamReader) -> str:
    """Show each line when the next one comes; return the last instead: it may be the error.

    A progress bar overwrites its line again and again: of that, a state is shown now and then.
    """
    held, rest, shown = "", b"", monotonic()
    while chunk := await stream.read(MOST_OF_A_LINE):
        *lines, rest = (rest + chunk).split(b"\n")
        rest = rest[-MOST_OF_A_LINE:]
        for line in lines:
            if held:
                say(held)
            held = _last_state(line) or held
        if b"\r" in rest and monotonic() - shown > PROGRESS_SECONDS:
            say(_last_state(rest))
            shown = monotonic()
    return _last_state(rest) or held


def _last_state(line: bytes) -> str:
    states = (state.strip() for state in line.decode(errors="replace").split("\r"))
    return next((state for state in reversed([*states]) if state), "")
