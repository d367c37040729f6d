"""The open-loop load generator: every request is sent at its scheduled time, whatever happened
before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from experiments.record import Record
from experiments.workload import ScheduledRequest
from tasuki.client import Client, GenerateOutput
from tasuki.errors import TasukiError

LEAD_SECONDS = 0.2  # between building the tasks and the first scheduled time


async def replay(
    target: str, requests: Sequence[ScheduledRequest], *, patience: float = 120.0
) -> list[Record]:
    """Send `requests` to the router at `target`; returns one record each, in their order."""
    async with Client(target) as client:
        await client.model_info()  # the connection is there before the clock starts
        start = time.monotonic() + LEAD_SECONDS
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_send(client, request, start, patience)) for request in requests
            ]
    return [task.result() for task in tasks]


async def _send(client: Client, request: ScheduledRequest, start: float, patience: float) -> Record:
    await asyncio.sleep(max(0.0, start + request.at - time.monotonic()))
    sent = time.monotonic() - start
    first: float | None = None
    last: float | None = None
    tokens = 0
    final: GenerateOutput | None = None
    outcome = "completed"
    try:
        async for output in client.generate(
            prompt_token_ids=request.prompt_token_ids,
            max_tokens=request.max_tokens,
            ignore_eos=True,  # the trace says how long the answer is
            timeout=patience,
        ):
            if output.token_ids:
                last = time.monotonic() - start
                first = last if first is None else first
                tokens += len(output.token_ids)
            final = output
    except TasukiError as error:
        outcome = error.code.value
    placement = final.placement if final is not None else None
    timings = final.timings if final is not None else None
    return Record(
        index=request.index,
        prompt_tokens=len(request.prompt_token_ids),
        scheduled=request.at,
        sent=sent,
        first=first,
        last=last,
        tokens=tokens,
        outcome=outcome,
        placement=placement.kind if placement else "",
        reason=placement.reason if placement else "",
        fallback=placement.fallback_reason if placement else "",
        transfer=timings.transfer if timings else 0.0,
        transfer_bytes=timings.transfer_bytes if timings else 0,
    )
