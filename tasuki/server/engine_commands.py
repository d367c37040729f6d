"""Commands to the engine that have an answer: sends them, waits for it, never for ever.

Knows nothing about what they do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tasuki.errors import DeadlineError, TasukiError
from tasuki.messages import Command, CommandResult, ToEngine


class EngineCommands:
    """Numbers are never used twice, so that a late answer finds nobody."""

    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self._send = send
        self._waiting: dict[int, asyncio.Future[CommandResult]] = {}
        self._next = 0

    async def run(self, make: Callable[[int], Command], seconds: float) -> CommandResult:
        """Send the command that `make` gives for a number, and wait for its result.

        Raises DeadlineError, or what the engine ended with.
        """
        self._next += 1
        number = self._next
        answer: asyncio.Future[CommandResult] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._send(make(number))
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            raise DeadlineError(f"the engine did not answer within {seconds:g} s") from None
        finally:
            del self._waiting[number]

    def deliver(self, result: CommandResult) -> None:
        answer = self._waiting.get(result.command_id)
        if answer is not None and not answer.done():
            answer.set_result(result)

    def fail_all(self, error: TasukiError) -> None:
        """The engine has ended."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)
