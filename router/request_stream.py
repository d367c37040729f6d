"""One Generate call, from its arrival to its last message.

1. Arrived: checked, tokenized, or refused at once.
2. Admitted: waits in the bounded queue for a placement.
3. Placed: a Decode stream to the chosen worker; a worker that refuses before any token (no_kv,
   queue_full, draining) sends the request back to the head of the queue.
   One that is lost later (dead, draining, silent) is replaced: prompt and tokens so far go to
   another, each open sample by itself, and the stream goes on at the next index.
4. Tokens: what comes together leaves together, at once.
   A stop string in their text ends a sample here; when all have ended, so does the Decode stream.
5. The end of each sample: finish reason and usage. With the last one: timings and placement; the
   request is judged against its SLO, and counted.
A caller that goes away cancels the task of this call, and with it, at any point, the Decode stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

import grpc

from router.answer import Answer, PromptPlace
from router.decode_request import decode_request
from router.generation import Generation
from router.placement import PlacementRequest
from router.placer import Placed, Placer
from router.recorder import Recorder
from router.workers.decode_call import DecodeCall, WorkerLostError
from router.workers.watched_worker import WatchedWorker
from tasuki.clock import Clock
from tasuki.errors import DeadlineError, TasukiError
from tasuki.messages import (
    DispatchedEvent,
    FallbackEvent,
    FinishedEvent,
    FinishReason,
    FirstTokenParts,
    LocalEvent,
    TokensEvent,
)
from tasuki.reasons import PlacementReason, RejectionReason
from tasuki.text.tokenizer import Tokenizer
from tasuki.timeline import Timeline
from tasuki.v1 import inference_pb2

log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]

PLACED_ELSEWHERE = (RejectionReason.NO_KV, RejectionReason.QUEUE_FULL, RejectionReason.DRAINING)
REFUSALS = (*PLACED_ELSEWHERE, RejectionReason.INVALID, RejectionReason.TOO_LONG)
GRACE = 1.0  # seconds past its deadline that a worker gets to end a request itself
SAME_MOMENT = 0.02  # seconds; a call that gRPC cancels this close to its deadline ran into it


@dataclass(frozen=True)
class RouterParts:
    """What every request of one router uses."""

    placer: Placer
    recorder: Recorder
    tokenizer: Tokenizer
    vocab_size: int
    clock: Clock
    max_migrations: int


@dataclass(frozen=True)
class Refusal:
    """A worker would not take it; nothing was lost."""


class RequestStream:
    """`deadline` is on the router's clock. `run` raises what ended the request, once counted."""

    def __init__(self, context: Context, parts: RouterParts, deadline: float) -> None:
        self._context = context
        self._placer = parts.placer
        self._recorder = parts.recorder
        self._tokenizer = parts.tokenizer
        self._vocab_size = parts.vocab_size
        self._clock = parts.clock
        self._max_migrations = parts.max_migrations
        self._deadline = deadline
        self._writing = asyncio.Lock()
        self._timeline = Timeline(arrived=parts.clock())
        self._on_worker = False  # a decode worker has it, and has not refused it
        self._place_counted = False
        self._counted = False

    async def run(self, read: Awaitable[Generation]) -> None:
        """Check it, place it, stream it, count it. Raises TasukiError or CancelledError."""
        try:
            await self._serve(await read)
        except asyncio.CancelledError:
            self._count_cancelled()
            raise
        except Exception as error:
            self._count_error(error)
            raise
        finally:
            if self._timeline.queue is not None:
                self._recorder.queued(self._timeline.queue)

    async def _serve(self, generation: Generation) -> None:
        answer = Answer(generation, self._tokenizer)
        self._timeline.admitted = self._clock()
        if generation.outputs:
            await self._go_on(generation, answer, None)
            return
        request = PlacementRequest(
            generation.prompt_len, generation.sampling.max_tokens, generation.sampling.n
        )
        placed = await self._placer.place(request, self._deadline)
        losses = 0
        while lost := await self._attempt(placed, generation, answer, None):
            if isinstance(lost, Refusal):
                placed = await self._placer.place_again(placed)
                continue
            losses += 1
            self._note_loss(lost, losses)
            if answer.has_tokens:
                await self._go_on(generation, answer, placed)
                return
            worker = placed.charge.decode
            placed = await self._placer.place_after_loss(request, self._deadline, worker)

    async def _go_on(self, generation: Generation, answer: Answer, lost: Placed | None) -> None:
        """Every sample that is open goes on by itself, each on whichever worker takes it."""
        answer.moved = True
        try:
            async with asyncio.TaskGroup() as group:
                for sample_index in answer.open_samples:
                    group.create_task(self._go_on_one(generation, answer, sample_index, lost))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _go_on_one(
        self, generation: Generation, answer: Answer, sample_index: int, lost: Placed | None
    ) -> None:
        stopped = answer.stopped(sample_index)  # the router before had no time to say so
        if stopped is not None:
            place = PromptPlace("", "local", PlacementReason.MIGRATED)
            await self._send_end(stopped, place, generation, answer)
            return
        worker = None if lost is None else lost.charge.decode
        placed, losses = await self._place_one(generation, answer, sample_index, worker), 0
        while True:
            before = answer.num_tokens(sample_index)
            failure = await self._attempt(placed, generation, answer, sample_index)
            if failure is None:
                return
            if isinstance(failure, Refusal):
                placed = await self._placer.place_again(placed)
                continue
            losses = 1 if answer.num_tokens(sample_index) > before else losses + 1
            self._note_loss(failure, losses)
            worker = placed.charge.decode
            placed = await self._place_one(generation, answer, sample_index, worker)

    async def _place_one(
        self,
        generation: Generation,
        answer: Answer,
        sample_index: int,
        lost: WatchedWorker | None,
    ) -> Placed:
        known = answer.num_tokens(sample_index)
        request = PlacementRequest(
            generation.prompt_len + known,
            max(generation.sampling.max_tokens - known, 0),
            goes_on=True,
        )
        return await self._placer.place_after_loss(request, self._deadline, lost)

    def _note_loss(self, lost: WorkerLostError, losses: int) -> None:
        """Raises `lost` when one request has lost so many workers that it may be the cause."""
        if losses > self._max_migrations:
            raise lost
        log.warning("request goes on elsewhere: %s", lost.message)
        self._recorder.migrated(lost.migration)

    async def _attempt(
        self, placed: Placed, generation: Generation, answer: Answer, sample_index: int | None
    ) -> Refusal | WorkerLostError | None:
        """All samples, or one that goes on, on one decode worker; None when it was served to its
        end, else why another worker should be tried. Raises what ends the request.
        """
        if not self._timeline.num_tokens:
            self._timeline.placed = self._clock()
        self._on_worker = True
        before = answer.num_tokens(sample_index)  # others that go on get theirs meanwhile
        try:
            async with asyncio.timeout(max(self._time_left(), 0.0) + GRACE):
                await self._stream(placed, generation, answer, sample_index)
        except TimeoutError:
            raise DeadlineError("the request's deadline passed while it was served") from None
        except TasukiError as error:
            if error.reason in PLACED_ELSEWHERE and answer.num_tokens(sample_index) == before:
                self._on_worker = False
                return Refusal()
            if isinstance(error, WorkerLostError):
                return error
            raise
        finally:
            self._placer.release(placed)
        return None

    async def _stream(
        self, placed: Placed, generation: Generation, answer: Answer, sample_index: int | None
    ) -> None:
        place = PromptPlace.planned(placed.placement)
        call = DecodeCall(
            placed.charge.decode,
            decode_request(
                placed.placement, generation, answer, sample_index, max(self._time_left(), 0.001)
            ),
            self._vocab_size,
        )
        async with contextlib.aclosing(call.events()) as events:
            async for event in events:
                match event:
                    case TokensEvent() if answer.is_open(event.sample_index):
                        await self._send_tokens(event, placed, answer)
                        stopped = answer.stopped(event.sample_index)
                        if stopped is not None:
                            await self._send_end(stopped, place, generation, answer)
                    case FinishedEvent() if answer.is_open(event.sample_index):
                        await self._send_end(event, place, generation, answer)
                    case TokensEvent() | FinishedEvent():
                        pass  # of a sample that a stop string ended
                    case _:
                        self._note_place(event, place, placed)
                told = answer.is_over if sample_index is None else not answer.is_open(sample_index)
                if told and not call.is_over:
                    return  # which cancels what the worker still does

    def _note_place(
        self,
        event: DispatchedEvent | LocalEvent | FallbackEvent,
        place: PromptPlace,
        placed: Placed,
    ) -> None:
        """The decode worker says where the prompt is computed; a placement is counted once."""
        match event:
            case DispatchedEvent():
                place.dispatched(event.prefill_worker_id)
                placed.charge.dispatched(event.prefill_worker_id)
            case LocalEvent():
                place.local(event.reason)
                placed.charge.local()
            case FallbackEvent():
                placed.charge.local()
                self._recorder.fell_back(event.reason)
        if not self._place_counted:
            self._place_counted = True
            self._recorder.placed(place.kind, place.reason)
        if isinstance(event, FallbackEvent):
            place.fell_back(event)

    async def _send_tokens(self, event: TokensEvent, placed: Placed, answer: Answer) -> None:
        response = answer.delta(event)
        first = not self._timeline.num_tokens
        gaps = self._timeline.tokens_left(
            self._clock(), len(response.token_ids), event.sample_index
        )
        if first:
            self._timeline.worker_parts = event.parts or FirstTokenParts()
            self._recorder.first_token(self._timeline)
        placed.charge.first_token()
        self._recorder.gaps(gaps)
        await self._write(response)

    async def _send_end(
        self, event: FinishedEvent, place: PromptPlace, generation: Generation, answer: Answer
    ) -> None:
        """The end of a sample; with that of the last one the request is judged and counted.

        Raises for an end that is no answer.
        """
        if event.finish_reason is FinishReason.ERROR:
            raise TasukiError("the decode worker could not finish the request; see its log")
        response = answer.end(event)
        if answer.is_over:
            if answer.missed_deadline:
                result = self._recorder.failed()
            else:
                result = self._recorder.completed(self._timeline, generation.slo)
            self._counted = True
            answer.add_facts(response, place, self._timeline, result)
        await self._write(response)

    async def _write(self, response: inference_pb2.GenerateResponse) -> None:
        async with self._writing:  # samples that go on by themselves take turns
            await self._context.write(response)

    def _time_left(self) -> float:
        return self._deadline - self._clock()

    def _count_cancelled(self) -> None:
        """gRPC cancels a call whose caller went away, and one whose deadline passed, alike."""
        if self._time_left() <= SAME_MOMENT:
            self._count_error(DeadlineError("the request's deadline passed"))
        elif not self._counted:
            self._recorder.cancelled()

    def _count_error(self, error: Exception) -> None:
        if self._counted:
            return  # it ended, and only its last message did not get through
        self._counted = True
        reason = error.reason if isinstance(error, TasukiError) else ""
        began = self._timeline.num_tokens > 0
        refused = reason in REFUSALS if self._on_worker else reason in set(RejectionReason)
        if refused and not began:
            self._recorder.rejected(reason)
        else:
            self._recorder.failed()
