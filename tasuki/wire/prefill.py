"""Worker.Prefill on the wire: requests of a decode worker, events of a prefill worker.

The end of a prefill has no event: its stream ends with status OK, or with an error's status.
"""

from __future__ import annotations

from tasuki.errors import InvalidRequestError
from tasuki.messages import (
    AcceptedEvent,
    FirstTokenEvent,
    PrefillRequest,
    ProgressEvent,
)
from tasuki.v1 import worker_pb2
from tasuki.wire import values
from tasuki.wire.sampling import (
    logprobs_from_proto,
    logprobs_to_proto,
    require_logprobs,
    sampling_from_proto,
    sampling_to_proto,
)

WirePrefillEvent = AcceptedEvent | ProgressEvent | FirstTokenEvent
"""The events that travel: all but PrefillDoneEvent and FailedEvent."""


def prefill_request_to_proto(request: PrefillRequest) -> worker_pb2.PrefillRequest:
    return worker_pb2.PrefillRequest(
        request_id=request.request_id,
        handoff_id=request.handoff_id,
        link_id=request.link_id,
        prefill_epoch=request.prefill_epoch,
        decode_worker_id=request.decode_worker_id,
        decode_epoch=request.decode_epoch,
        prompt_token_ids=request.prompt_token_ids,
        first_block=request.first_block,
        sampling=sampling_to_proto(request.sampling),
        timeout=request.timeout,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def prefill_request_from_proto(request: worker_pb2.PrefillRequest) -> PrefillRequest:
    if not request.prompt_token_ids:
        raise InvalidRequestError("the prompt is empty; expected at least one token")
    return PrefillRequest(
        request_id=values.name("request_id", request.request_id),
        handoff_id=values.hex_id("handoff_id", request.handoff_id),
        link_id=values.hex_id("link_id", request.link_id),
        prefill_epoch=request.prefill_epoch,
        decode_worker_id=values.name("decode_worker_id", request.decode_worker_id),
        decode_epoch=request.decode_epoch,
        prompt_token_ids=list(request.prompt_token_ids),
        first_block=request.first_block,
        sampling=sampling_from_proto(request.sampling),
        timeout=values.finite("timeout", request.timeout) if request.HasField("timeout") else None,
        priority=request.priority,
        cache_salt=values.short("cache_salt", request.cache_salt),
    )


def prefill_event_to_proto(event: WirePrefillEvent) -> worker_pb2.PrefillEvent:
    match event:
        case AcceptedEvent():
            accepted = worker_pb2.Accepted(queued_tokens=event.queued_tokens)
            return worker_pb2.PrefillEvent(accepted=accepted)
        case ProgressEvent():
            progress = worker_pb2.Progress(computed_tokens=event.computed_tokens)
            return worker_pb2.PrefillEvent(progress=progress)
        case FirstTokenEvent():
            first_token = worker_pb2.FirstToken(
                token_ids=event.token_ids,
                cached_tokens=event.cached_tokens,
                queue_seconds=event.queue_seconds,
                compute_seconds=event.compute_seconds,
                logprobs=logprobs_to_proto(event.logprobs),
                prompt_logprobs=logprobs_to_proto(event.prompt_logprobs),
            )
            return worker_pb2.PrefillEvent(first_token=first_token)


def prefill_event_from_proto(event: worker_pb2.PrefillEvent) -> WirePrefillEvent:
    match event.WhichOneof("event"):
        case "accepted":
            return AcceptedEvent(queued_tokens=event.accepted.queued_tokens)
        case "progress":
            return ProgressEvent(computed_tokens=event.progress.computed_tokens)
        case "first_token":
            return _first_token_from_proto(event.first_token)
        case _:
            raise InvalidRequestError("a PrefillEvent holds no event; is the sender newer?")


def _first_token_from_proto(first: worker_pb2.FirstToken) -> FirstTokenEvent:
    require_logprobs(len(first.token_ids), len(first.logprobs))
    return FirstTokenEvent(
        token_ids=list(first.token_ids),
        cached_tokens=first.cached_tokens,
        queue_seconds=values.finite("queue_seconds", first.queue_seconds),
        compute_seconds=values.finite("compute_seconds", first.compute_seconds),
        logprobs=logprobs_from_proto(first.logprobs),
        prompt_logprobs=logprobs_from_proto(first.prompt_logprobs),
    )
