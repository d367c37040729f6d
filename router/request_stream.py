"""One Generate call, from its arrival to its last message.

1. Arrived: checked, tokenized, or refused at once.
2. Admitted: waits in the bounded queue for a placement.
3. Placed: a Decode stream to the chosen worker; a worker that refuses before any token (no_kv,
   queue_full, draining) sends the request back to the head of the queue.
4. Tokens: what comes together leaves together, at once.
   A stop string in their text ends a sample here; when all have ended, so does the Decode stream.
5. The end of each sample: finish reason and usage. With the last one: timings and placement; the
   request is judged against its SLO, and counted.
A caller that goes away cancels the task of this call, and with it, at any point, the Decode stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

import grpc

from router.answer import Answer, PromptPlace
from router.decode_call import DecodeCall
from router.generation import Generation
from router.placement import PlacementRequest
from router.placer import Placed, Placer
from router.recorder import Recorder
from tasuki.clock import Clock
from tasuki.errors import DeadlineError, TasukiError, UnavailableError
from tasuki.messages import (
    DecodeRequest,
    DispatchedEvent,
    FallbackEvent,
    FinishedEvent,
    FinishReason,
    FirstTokenParts,
    LocalEvent,
    TokensEvent,
)
from tasuki.model.tokenizer import Tokenizer
from tasuki.reasons import RejectionReason
from tasuki.timeline import Timeline

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
    clock: Clock


class RequestStream:
    """`deadline` is on the router's clock. `run` raises what ended the request, once counted."""

    def __init__(self, context: Context, parts: RouterParts, deadline: float) -> None:
        self._context = context
        self._placer = parts.placer
        self._recorder = parts.recorder
        self._tokenizer = parts.tokenizer
        self._clock = parts.clock
        self._deadline = deadline
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
        sampling = generation.sampling
        request = PlacementRequest(generation.prompt_len, sampling.max_tokens, sampling.n)
        placed = await self._placer.place(request, self._deadline)
        while not await self._attempt(placed, generation, answer):
            placed = await self._placer.place_again(placed)

    async def _attempt(self, placed: Placed, generation: Generation, answer: Answer) -> bool:
        """One attempt on one decode worker; False when it refused and another one may be tried."""
        self._timeline.placed = self._clock()
        self._on_worker = True
        try:
            async with asyncio.timeout(max(self._time_left(), 0.0) + GRACE):
                await self._stream(placed, generation, answer)
        except TimeoutError:
            raise DeadlineError("the request's deadline passed while it was served") from None
        except TasukiError as error:
            if self._timeline.num_tokens or error.reason not in PLACED_ELSEWHERE:
                raise
            self._on_worker = False
            return False
        finally:
            self._placer.release(placed)
        return True

    async def _stream(self, placed: Placed, generation: Generation, answer: Answer) -> None:
        place = PromptPlace.planned(placed.placement)
        request = DecodeRequest(
            request_id=generation.request_id,
            prompt_token_ids=generation.prompt_token_ids,
            output_token_ids=[],
            sampling=generation.sampling,
            prefill_candidates=list(placed.placement.candidates),
            local_reason="" if placed.placement.candidates else placed.placement.reason,
            timeout=max(self._time_left(), 0.001),
            priority=generation.priority,
            cache_salt=generation.cache_salt,
        )
        call = DecodeCall(placed.charge.decode, request)
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
                if answer.is_over and not call.is_over:
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
        gaps = self._timeline.tokens_left(
            self._clock(), len(response.token_ids), event.sample_index
        )
        if event.index == 0 and event.sample_index == 0:
            self._timeline.worker_parts = event.parts or FirstTokenParts()
            placed.charge.first_token()
            self._recorder.first_token(self._timeline)
        self._recorder.gaps(gaps)
        await self._context.write(response)

    async def _send_end(
        self, event: FinishedEvent, place: PromptPlace, generation: Generation, answer: Answer
    ) -> None:
        """The end of a sample; with that of the last one the request is judged and counted.

        Raises for an end that is no answer.
        """
        match event.finish_reason:
            case FinishReason.CANCELLED:
                raise UnavailableError("the decode worker gave the request up; send it again")
            case FinishReason.ERROR:
                raise TasukiError("the decode worker could not finish the request; see its log")
        response = answer.end(event)
        if answer.is_over:
            if answer.missed_deadline:
                result = self._recorder.failed()
            else:
                result = self._recorder.completed(self._timeline, generation.slo)
            self._counted = True
            answer.add_facts(response, place, self._timeline, result)
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
