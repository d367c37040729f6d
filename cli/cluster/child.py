"""One child process: its start, its ready line, its last words, its end. Knows no roles.

A child leads its own session, so that a Ctrl-C meant for the parent does not reach it twice. It
reads nothing, and gets `--ready-fd`, on which it writes one line when ready, and `--lifeline-fd`,
whose end means that its parent is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from cli.cluster.lifeline import Lifeline
from cli.cluster.process_group import end_group, kill_group
from cli.cluster.ready_line import ReadyLine, parse_ready_line
from tasuki.errors import UnavailableError

TAIL_LINES = 20
TAIL_BYTES = 16_384


class ProcessError(UnavailableError):
    """A process that could not be started, or that ended when it should not have."""

    default_reason = "process"


class Child:
    """A running child. Made by `start`; its owner must `end` it."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, ready_fd: int, log: Path | None
    ) -> None:
        self.name = name
        self.pid = process.pid
        self.killed_on_purpose = False
        self._process = process
        self._ready_fd = ready_fd
        self._was_ready = False
        self._log = log

    @classmethod
    async def start(
        cls,
        name: str,
        argv: Sequence[str],
        *,
        lifeline: Lifeline,
        env: Mapping[str, str],
        log_dir: Path | None = None,
    ) -> Child:
        """Start `argv`. Its output goes to `log_dir/name.log`, or without one to our stderr.

        Raises ProcessError when the program cannot be run at all.
        """
        log = None if log_dir is None else log_dir / f"{name}.log"
        read_fd, write_fd = os.pipe()
        output = 2
        try:
            output = 2 if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            process = await asyncio.create_subprocess_exec(
                *argv,
                f"--ready-fd={write_fd}",
                f"--lifeline-fd={lifeline.read_fd}",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(env),
                pass_fds=(write_fd, lifeline.read_fd),
                start_new_session=True,
            )
        except OSError as error:
            os.close(read_fd)
            raise ProcessError(f"{name} could not be started: {error}") from error
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
            if output != 2:
                os.close(output)
        return cls(name, process, read_fd, log)

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def wait_ready(self) -> ReadyLine:
        """Wait for the ready line. Raises ProcessError if the child ends or writes another."""
        line = await self._read_ready_line()
        if not line.endswith(b"\n"):
            # The pipe closed: nearly always because the child ended, which wait() confirms.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wait(), 1.0)
            raise ProcessError(self.describe())
        try:
            ready = parse_ready_line(line)
        except ValueError as error:
            text = line.decode(errors="replace").strip()
            raise ProcessError(f"{self.name} wrote {text!r} as its ready line: {error}") from error
        self._was_ready = True
        return ready

    async def _read_ready_line(self) -> bytes:
        reader = asyncio.StreamReader()
        pipe = os.fdopen(self._ready_fd, "rb", 0)
        self._ready_fd = -1
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            return await reader.readline()
        except ValueError:  # a line without an end; 64 KiB is the reader's limit
            return b"(a line of more than 64 KiB)\n"
        finally:
            transport.close()

    async def wait(self) -> int:
        """Wait until the child has ended; its exit code, or minus the number of the signal."""
        return await self._process.wait()

    def describe(self) -> str:
        """Which child ended, and how, with its last words if they are in a log of ours."""
        what = "is gone" if self._was_ready else "did not start"
        return f"{self.name} (process {self.pid}) {what}: {self._how()}"

    def _how(self) -> str:
        code = self._process.returncode
        if code is None:
            how = "it still runs"
        elif code < 0:
            how = f"it was ended by {signal.Signals(-code).name}"
        else:
            how = f"it exited with code {code}"
        if self._log is None:
            return f"{how} (its messages stand above)"
        tail = self.log_tail()
        words = f"its last words:\n{tail}" if tail else "it said nothing"
        return f"{how}; {words}\n({self._log})" if tail else f"{how}; {words} ({self._log})"

    def log_tail(self) -> str:
        """The last lines of the child's log, indented; empty without a log."""
        if self._log is None:
            return ""
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
            return "\n".join(f"    {line}" for line in lines)
        return ""

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the child alone; one that has ended is left in peace."""
        if self.running:
            # Not Process.send_signal: on Python 3.11 that may reap the child behind asyncio's back.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the child and all that it started, at once."""
        if self.running:
            kill_group(self.pid)

    async def end(self, deadline: float) -> list[int]:
        """End whatever is left of the child's group and return what was held for it.

        Returns the process ids that could not be ended within `deadline` seconds.
        """
        if self._ready_fd >= 0:
            os.close(self._ready_fd)
            self._ready_fd = -1
        left = await end_group(self.pid, deadline)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), deadline)
        return left
