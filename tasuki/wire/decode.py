"""Worker.Decode on the wire: requests of a router, events of a decode worker.

A failed request has no event: its stream ends with a status, which `tasuki.server.status` makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tasuki.errors import InvalidRequestError
from tasuki.messages import (
    DecodeRequest,
    DispatchedEvent,
    FallbackEvent,
    FinishedEvent,
    FirstTokenParts,
    HandoffTimings,
    LocalEvent,
    TokensEvent,
)
from tasuki.v1 import common_pb2, worker_pb2
from tasuki.wire import values
from tasuki.wire.sampling import (
    logprobs_from_proto,
    logprobs_to_proto,
    require_logprobs,
    sampling_from_proto,
    sampling_to_proto,
)

WireDecodeEvent = DispatchedEvent | LocalEvent | FallbackEvent | TokensEvent | FinishedEvent
"""The events that travel: all but FailedEvent."""


def decode_request_to_proto(request: DecodeRequest) -> worker_pb2.DecodeRequest:
    return worker_pb2.DecodeRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        sampling=sampling_to_proto(request.sampling),
        prefill_candidates=[values.target_to_proto(t) for t in request.prefill_candidates],
        local_reason=request.local_reason,
        timeout=request.timeout,
        priority=request.priority,
        cache_salt=request.cache_salt,
        sample_index=request.sample_index,
    )


def decode_request_from_proto(request: worker_pb2.DecodeRequest) -> DecodeRequest:
    if not request.prompt_token_ids:
        raise InvalidRequestError("the prompt is empty; expected at least one token")
    return DecodeRequest(
        request_id=values.name("request_id", request.request_id),
        prompt_token_ids=list(request.prompt_token_ids),
        output_token_ids=list(request.output_token_ids),
        sampling=sampling_from_proto(request.sampling),
        prefill_candidates=[values.target_from_proto(t) for t in request.prefill_candidates],
        local_reason=request.local_reason,
        timeout=values.finite("timeout", request.timeout) if request.HasField("timeout") else None,
        priority=request.priority,
        cache_salt=values.short("cache_salt", request.cache_salt),
        sample_index=request.sample_index,
    )


def decode_event_to_proto(event: WireDecodeEvent) -> worker_pb2.DecodeEvent:
    match event:
        case TokensEvent():
            return worker_pb2.DecodeEvent(tokens=_tokens_to_proto(event))
        case DispatchedEvent():
            dispatched = worker_pb2.Dispatched(prefill_worker_id=event.prefill_worker_id)
            return worker_pb2.DecodeEvent(dispatched=dispatched)
        case LocalEvent():
            return worker_pb2.DecodeEvent(local=worker_pb2.Local(reason=event.reason))
        case FallbackEvent():
            fallback = worker_pb2.Fallback(reason=event.reason, kept_tokens=event.kept_tokens)
            return worker_pb2.DecodeEvent(fallback=fallback)
        case FinishedEvent():
            return worker_pb2.DecodeEvent(finished=_finished_to_proto(event))


def decode_event_from_proto(event: worker_pb2.DecodeEvent) -> WireDecodeEvent:
    kind = event.WhichOneof("event")
    if kind is None:
        raise InvalidRequestError("a DecodeEvent holds no event; is the sender newer?")
    return _EVENTS[kind](getattr(event, kind))


def _tokens_to_proto(event: TokensEvent) -> worker_pb2.Tokens:
    parts = event.parts
    return worker_pb2.Tokens(
        index=event.index,
        token_ids=event.token_ids,
        offsets=event.offsets,
        parts=None
        if parts is None
        else worker_pb2.FirstTokenParts(
            reservation=parts.reservation,
            prefill_queue=parts.prefill_queue,
            prefill_compute=parts.prefill_compute,
            fallback=parts.fallback,
        ),
        logprobs=logprobs_to_proto(event.logprobs),
        prompt_logprobs=logprobs_to_proto(event.prompt_logprobs),
        cached_tokens=event.cached_tokens,
        computed_prompt_tokens=event.computed_prompt_tokens,
        sample_index=event.sample_index,
    )


def _tokens_from_proto(tokens: worker_pb2.Tokens) -> TokensEvent:
    if len(tokens.offsets) != len(tokens.token_ids):
        raise InvalidRequestError(
            f"{len(tokens.token_ids)} tokens came with {len(tokens.offsets)} offsets; "
            "expected one each"
        )
    require_logprobs(len(tokens.token_ids), len(tokens.logprobs))
    return TokensEvent(
        index=tokens.index,
        token_ids=list(tokens.token_ids),
        offsets=[values.finite("offset", offset) for offset in tokens.offsets],
        parts=_parts_from_proto(tokens.parts) if tokens.HasField("parts") else None,
        logprobs=logprobs_from_proto(tokens.logprobs),
        prompt_logprobs=logprobs_from_proto(tokens.prompt_logprobs),
        cached_tokens=tokens.cached_tokens,
        computed_prompt_tokens=tokens.computed_prompt_tokens,
        sample_index=tokens.sample_index,
    )


def _parts_from_proto(parts: worker_pb2.FirstTokenParts) -> FirstTokenParts:
    return FirstTokenParts(
        reservation=values.finite("reservation", parts.reservation),
        prefill_queue=values.finite("prefill_queue", parts.prefill_queue),
        prefill_compute=values.finite("prefill_compute", parts.prefill_compute),
        fallback=values.finite("fallback", parts.fallback),
    )


def _finished_to_proto(event: FinishedEvent) -> worker_pb2.Finished:
    handoff = event.handoff
    return worker_pb2.Finished(
        finish_reason=values.finish_reason_to_proto(event.finish_reason),
        usage=common_pb2.Usage(
            prompt_tokens=event.prompt_tokens,
            completion_tokens=event.output_tokens,
            cached_tokens=event.cached_tokens,
        ),
        computed_prompt_tokens=event.computed_prompt_tokens,
        transfer=handoff.transfer,
        exposed_transfer=handoff.exposed_transfer,
        commit_wait=handoff.commit_wait,
        first_decode=handoff.first_decode,
        transfer_bytes=handoff.nbytes,
        transfer_blocks=handoff.blocks,
        preemptions=event.preemptions,
        stop_token_id=event.stop_token_id,
        sample_index=event.sample_index,
        samples_left=event.samples_left,
    )


def _finished_from_proto(finished: worker_pb2.Finished) -> FinishedEvent:
    reason = values.finish_reason_from_proto(finished.finish_reason)
    if reason is None:
        raise InvalidRequestError("a Finished event lacks its finish_reason")
    handoff = HandoffTimings(
        transfer=values.finite("transfer", finished.transfer),
        exposed_transfer=values.finite("exposed_transfer", finished.exposed_transfer),
        commit_wait=values.finite("commit_wait", finished.commit_wait),
        first_decode=values.finite("first_decode", finished.first_decode),
        nbytes=finished.transfer_bytes,
        blocks=finished.transfer_blocks,
    )
    return FinishedEvent(
        finish_reason=reason,
        prompt_tokens=finished.usage.prompt_tokens,
        output_tokens=finished.usage.completion_tokens,
        cached_tokens=finished.usage.cached_tokens,
        computed_prompt_tokens=finished.computed_prompt_tokens,
        handoff=handoff,
        preemptions=finished.preemptions,
        stop_token_id=finished.stop_token_id if finished.HasField("stop_token_id") else None,
        sample_index=finished.sample_index,
        samples_left=finished.samples_left,
    )


_EVENTS: dict[str, Callable[[Any], WireDecodeEvent]] = {
    "dispatched": lambda e: DispatchedEvent(prefill_worker_id=e.prefill_worker_id),
    "local": lambda e: LocalEvent(reason=e.reason),
    "fallback": lambda e: FallbackEvent(reason=e.reason, kept_tokens=e.kept_tokens),
    "tokens": _tokens_from_proto,
    "finished": _finished_from_proto,
}
