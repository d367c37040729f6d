"""Every message survives the wire; every malformed one is an InvalidRequestError, nothing else."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasuki import messages as m
from tasuki.errors import InvalidRequestError
from tasuki.v1 import common_pb2, worker_pb2
from tasuki.wire import values
from tasuki.wire.decode import (
    decode_event_from_proto,
    decode_event_to_proto,
    decode_request_from_proto,
    decode_request_to_proto,
)
from tasuki.wire.link import link_frame_from_proto, link_frame_to_proto
from tasuki.wire.prefill import (
    prefill_event_from_proto,
    prefill_event_to_proto,
    prefill_request_from_proto,
    prefill_request_to_proto,
)
from tasuki.wire.watch import (
    WorkerReport,
    report_from_proto,
    report_to_proto,
    watch_request_from_proto,
    watch_request_to_proto,
)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
seconds = st.floats(0, 1e6)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
hex_ids = st.text("0123456789abcdef", min_size=32, max_size=32)
token_ids = st.lists(u32, max_size=6)
prompts = st.lists(u32, min_size=1, max_size=6)
addresses = st.builds(lambda port: f"127.0.0.1:{port}", st.integers(1, 65535))
counts = st.none() | st.integers(0, 20)
sampling = st.builds(
    m.SamplingParams,
    max_tokens=st.integers(1000, 2**32 - 1),
    min_tokens=st.integers(0, 1000),
    temperature=st.just(0.0) | st.floats(1e-5, 1e5),
    top_k=u32,
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1, exclude_max=True),
    n=st.just(1),  # more needs a temperature
    repetition_penalty=st.floats(1e-5, 1e5),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(u32, st.floats(-100, 100), max_size=3),
    seed=u64,
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(u32, max_size=3),
    logprobs=counts,
    prompt_logprobs=counts,
)
logprob = st.integers(0, 2).flatmap(
    lambda count: st.builds(
        m.TokenLogprob,
        token_id=u32,
        logprob=st.floats(-100, 0),
        rank=st.integers(1, 2**32 - 1),
        top_token_ids=st.lists(u32, min_size=count, max_size=count),
        top_logprobs=st.lists(st.floats(-100, 0), min_size=count, max_size=count),
    )
)
logprobs = st.lists(logprob, max_size=3)
targets = st.builds(m.PrefillTarget, worker_id=names, worker_epoch=u64, address=addresses)
timeouts = st.none() | st.floats(-10, 1e6)
finish = st.sampled_from(list(m.FinishReason))
parts = st.builds(
    m.FirstTokenParts,
    reservation=seconds,
    prefill_queue=seconds,
    prefill_compute=seconds,
    fallback=seconds,
)
decode_requests = st.builds(
    m.DecodeRequest,
    request_id=names,
    prompt_token_ids=prompts,
    output_token_ids=token_ids,
    sampling=sampling,
    prefill_candidates=st.lists(targets, max_size=3),
    local_reason=st.just("") | names,
    timeout=timeouts,
)
token_events = token_ids.flatmap(
    lambda ids: st.builds(
        m.TokensEvent,
        index=u32,
        token_ids=st.just(ids),
        offsets=st.lists(seconds, min_size=len(ids), max_size=len(ids)),
        parts=st.none() | parts,
        logprobs=st.just([]) | st.lists(logprob, min_size=len(ids), max_size=len(ids)),
        prompt_logprobs=logprobs,
        cached_tokens=u32,
        computed_prompt_tokens=u32,
        sample_index=u32,
    )
)
decode_events = st.one_of(
    st.builds(m.DispatchedEvent, prefill_worker_id=names),
    st.builds(m.LocalEvent, reason=names),
    st.builds(m.FallbackEvent, reason=names, kept_tokens=u32),
    token_events,
    st.builds(
        m.FinishedEvent,
        finish_reason=finish,
        prompt_tokens=u32,
        output_tokens=u32,
        cached_tokens=u32,
        computed_prompt_tokens=u32,
        preemptions=u32,
        stop_token_id=st.none() | u32,
        sample_index=u32,
        samples_left=u32,
        handoff=st.builds(
            m.HandoffTimings,
            transfer=seconds,
            exposed_transfer=seconds,
            commit_wait=seconds,
            first_decode=seconds,
            nbytes=u64,
            blocks=u32,
        ),
    ),
)
prefill_requests = st.builds(
    m.PrefillRequest,
    request_id=names,
    handoff_id=hex_ids,
    link_id=hex_ids,
    prefill_epoch=u64,
    decode_worker_id=names,
    decode_epoch=u64,
    prompt_token_ids=prompts,
    first_block=u32,
    sampling=sampling,
    timeout=timeouts,
)
prefill_events = st.one_of(
    st.builds(m.AcceptedEvent, queued_tokens=u32),
    st.builds(m.ProgressEvent, computed_tokens=u32),
    token_ids.flatmap(
        lambda ids: st.builds(
            m.FirstTokenEvent,
            token_ids=st.just(ids),
            cached_tokens=u32,
            queue_seconds=seconds,
            compute_seconds=seconds,
            logprobs=st.just([]) | st.lists(logprob, min_size=len(ids), max_size=len(ids)),
            prompt_logprobs=logprobs,
        )
    ),
)
layouts = st.builds(
    m.LayoutDescription,
    model_id=names,
    weights_digest=names,
    dtype=names,
    num_layers=u32,
    num_kv_heads=u32,
    head_dim=u32,
    block_size=u32,
    layout_version=names,
    numerics=names,
)
tokens_32 = st.binary(min_size=32, max_size=32)
digests = st.sampled_from(["xxh3", "none"])
link_messages = st.one_of(
    st.builds(
        m.LinkHello,
        token=tokens_32,
        decode_worker_id=names,
        decode_epoch=u64,
        prefill_worker_id=names,
        prefill_epoch=u64,
        layout=layouts,
        connector=names,
        digest=digests,
        max_segment_bytes=u64,
    ),
    st.builds(m.LinkAccept, token=tokens_32, layout=layouts, digest=digests, max_segment_bytes=u64),
    st.builds(m.Rendezvous, key=names, value=st.binary(max_size=64)),
    st.builds(
        m.Announce,
        link_seq=u64,
        handoff_id=hex_ids,
        first_block=u32,
        count=st.integers(1, 2**32 - 1),
        nbytes=st.integers(1, 2**64 - 1),
        digest=u64,
    ),
    st.builds(m.Posted, link_seq=u64),
    st.builds(m.Received, link_seq=u64, ok=st.booleans()),
    st.builds(m.Commit, handoff_id=hex_ids, tokens=u32, blocks=u32),
    st.builds(m.Abandoned, handoff_id=hex_ids, reason=names),
    st.builds(m.LinkClosed, reason=names),
    st.builds(m.Heartbeat, steps=u64, age=seconds),
)


@st.composite
def reports(draw: st.DrawFn) -> WorkerReport:
    total = draw(u32)
    link = st.builds(
        m.LinkReport,
        worker_id=names,
        worker_epoch=u64,
        state=st.sampled_from(["opening", "open", "failed"]),
    )
    load = m.LoadReport(
        worker_id=draw(names),
        worker_epoch=draw(u64),
        role=draw(st.sampled_from(list(m.Role))),
        ready=draw(st.booleans()),
        draining=draw(st.booleans()),
        free_blocks=draw(st.integers(0, total)),
        total_blocks=total,
        queued_tokens=draw(u64),
        running=draw(u32),
        waiting=draw(u32),
        prefill_tokens_per_second=draw(seconds),
        links=draw(st.lists(link, max_size=3)),
    )
    return WorkerReport(load, draw(st.integers(1, 2**32 - 1)), draw(u32), draw(names))


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


@settings(max_examples=60)
@given(decode_requests)
def test_decode_requests_survive(request: m.DecodeRequest) -> None:
    wired = over_the_wire(decode_request_to_proto(request))
    assert decode_request_from_proto(wired) == request


@settings(max_examples=60)
@given(decode_events)
def test_decode_events_survive(event: Any) -> None:
    assert decode_event_from_proto(over_the_wire(decode_event_to_proto(event))) == event


@settings(max_examples=60)
@given(prefill_requests)
def test_prefill_requests_survive(request: m.PrefillRequest) -> None:
    wired = over_the_wire(prefill_request_to_proto(request))
    assert prefill_request_from_proto(wired) == request


@settings(max_examples=60)
@given(prefill_events)
def test_prefill_events_survive(event: Any) -> None:
    assert prefill_event_from_proto(over_the_wire(prefill_event_to_proto(event))) == event


@settings(max_examples=150)
@given(hex_ids, link_messages)
def test_link_frames_survive(link_id: str, message: m.LinkMessage) -> None:
    wired = over_the_wire(link_frame_to_proto(link_id, message))
    assert link_frame_from_proto(wired) == (link_id, message)


@settings(max_examples=60)
@given(reports())
def test_reports_survive(report: WorkerReport) -> None:
    assert report_from_proto(over_the_wire(report_to_proto(report))) == report


@settings(max_examples=40)
@given(st.lists(targets, max_size=4))
def test_watch_requests_survive(workers: list[m.PrefillTarget]) -> None:
    assert watch_request_from_proto(over_the_wire(watch_request_to_proto(workers))) == workers


# --- malformed: readers take any bytes that parse, and raise InvalidRequestError or nothing

READERS: list[tuple[Any, Any]] = [
    (worker_pb2.DecodeRequest, decode_request_from_proto),
    (worker_pb2.DecodeEvent, decode_event_from_proto),
    (worker_pb2.PrefillRequest, prefill_request_from_proto),
    (worker_pb2.PrefillEvent, prefill_event_from_proto),
    (worker_pb2.LinkFrame, link_frame_from_proto),
    (worker_pb2.WatchRequest, watch_request_from_proto),
    (worker_pb2.LoadReport, report_from_proto),
]


@pytest.mark.parametrize(("cls", "read"), READERS, ids=lambda value: value.__name__)
@settings(max_examples=80)
@given(data=st.data())
def test_no_other_exception_leaks(cls: Any, read: Any, data: st.DataObject) -> None:
    """A valid message with some bytes changed, as far as protobuf itself still reads it."""
    sources: dict[Any, st.SearchStrategy[Any]] = {
        worker_pb2.DecodeRequest: decode_requests.map(decode_request_to_proto),
        worker_pb2.DecodeEvent: decode_events.map(decode_event_to_proto),
        worker_pb2.PrefillRequest: prefill_requests.map(prefill_request_to_proto),
        worker_pb2.PrefillEvent: prefill_events.map(prefill_event_to_proto),
        worker_pb2.LinkFrame: link_messages.map(lambda x: link_frame_to_proto("0" * 32, x)),
        worker_pb2.WatchRequest: st.lists(targets).map(watch_request_to_proto),
        worker_pb2.LoadReport: reports().map(report_to_proto),
    }
    body = bytearray(data.draw(sources[cls]).SerializeToString())
    for _ in range(data.draw(st.integers(0, 4))):
        if body:
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = cls.FromString(bytes(body))
    except Exception:
        return  # gRPC refuses it before we see it
    with contextlib.suppress(InvalidRequestError):
        read(message)


def changed(message: Any, change: Any) -> Any:
    change(message)
    return message


def a_decode_request() -> worker_pb2.DecodeRequest:
    return decode_request_to_proto(
        m.DecodeRequest(
            request_id="r",
            prompt_token_ids=[1],
            output_token_ids=[],
            sampling=m.SamplingParams(),
            prefill_candidates=[],
        )
    )


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda r: r.ClearField("prompt_token_ids"), "prompt"),
        (lambda r: r.ClearField("request_id"), "request_id"),
        (lambda r: r.sampling.ClearField("seed"), "seed"),
        (lambda r: r.ClearField("sampling"), "sampling"),
        (lambda r: setattr(r.sampling, "max_tokens", 0), "max_tokens"),
        (lambda r: setattr(r.sampling, "temperature", math.nan), "temperature"),
        (lambda r: setattr(r.sampling, "temperature", -1.0), "temperature"),
        (lambda r: setattr(r.sampling, "temperature", 1e-300), "temperature"),
        (lambda r: setattr(r.sampling, "min_tokens", 129), "min_tokens is 129.*which is 128"),
        (lambda r: setattr(r.sampling, "top_p", 0.0), "top_p is 0"),
        (lambda r: setattr(r.sampling, "top_p", math.nan), "top_p is nan"),
        (lambda r: setattr(r.sampling, "min_p", 1.0), "min_p is 1"),
        (lambda r: setattr(r.sampling, "min_p", -0.1), "min_p"),
        (lambda r: setattr(r.sampling, "repetition_penalty", 0.0), "repetition_penalty is 0"),
        (lambda r: setattr(r.sampling, "repetition_penalty", math.inf), "repetition_penalty"),
        (lambda r: setattr(r.sampling, "presence_penalty", 2.5), "presence_penalty is 2.5"),
        (lambda r: setattr(r.sampling, "frequency_penalty", math.nan), "frequency_penalty"),
        (lambda r: r.sampling.logit_bias.update({3: 101.0}), "logit_bias of token 3 is 101"),
        (lambda r: r.sampling.logit_bias.update({3: math.nan}), "logit_bias of token 3"),
        (lambda r: r.sampling.logit_bias.update(dict.fromkeys(range(1025), 0.0)), "1025 entries"),
        (lambda r: r.sampling.stop_token_ids.extend(range(65)), "stop_token_ids has 65"),
        (lambda r: r.sampling.stop.append("x"), "stop strings"),
        (lambda r: setattr(r.sampling, "logprobs", 21), "logprobs is 21"),
        (lambda r: setattr(r.sampling, "prompt_logprobs", 21), "prompt_logprobs is 21"),
        (lambda r: setattr(r, "timeout", math.inf), "timeout"),
        (lambda r: r.prefill_candidates.add(worker_id="p", address="nowhere"), "address"),
        (lambda r: r.prefill_candidates.add(worker_id="p", address="h:99999"), "address"),
        (lambda r: r.prefill_candidates.add(worker_id="", address="h:1"), "worker_id"),
    ],
)
def test_a_wrong_decode_request_is_named(change: Any, word: str) -> None:
    with pytest.raises(InvalidRequestError, match=word):
        decode_request_from_proto(changed(a_decode_request(), change))


@pytest.mark.parametrize(
    ("frame", "word"),
    [
        (worker_pb2.LinkFrame(link_id="0" * 32), "no message"),
        (worker_pb2.LinkFrame(link_id="short", posted=worker_pb2.Posted()), "link_id"),
        (worker_pb2.LinkFrame(link_id="G" * 32, posted=worker_pb2.Posted()), "link_id"),
        (worker_pb2.LinkFrame(link_id="0" * 32, hello=worker_pb2.LinkHello(token=b"1")), "token"),
        (
            worker_pb2.LinkFrame(
                link_id="0" * 32,
                rendezvous=worker_pb2.Rendezvous(key="k", value=b"x" * 65537),
            ),
            "rendezvous",
        ),
        (worker_pb2.LinkFrame(link_id="0" * 32, announce=worker_pb2.Announce()), "Announce"),
        (worker_pb2.LinkFrame(link_id="0" * 32, commit=worker_pb2.Commit()), "handoff_id"),
    ],
)
def test_a_wrong_link_frame_is_named(frame: worker_pb2.LinkFrame, word: str) -> None:
    with pytest.raises(InvalidRequestError, match=word):
        link_frame_from_proto(frame)


def test_unknown_enum_values_are_named() -> None:
    with pytest.raises(InvalidRequestError, match="finish_reason 77"):
        values.finish_reason_from_proto(77)
    with pytest.raises(InvalidRequestError, match="role 3"):
        values.role_from_proto(3)


def test_offsets_must_match_tokens() -> None:
    tokens = worker_pb2.Tokens(index=0, token_ids=[1, 2], offsets=[0.1])
    with pytest.raises(InvalidRequestError, match="2 tokens came with 1 offsets"):
        decode_event_from_proto(worker_pb2.DecodeEvent(tokens=tokens))


def test_an_impossible_report_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="impossible"):
        report_from_proto(worker_pb2.LoadReport(free_blocks=2, total_blocks=1, block_size=16))


def test_logprobs_must_match() -> None:
    tokens = worker_pb2.Tokens(
        index=0, token_ids=[1, 2], offsets=[0.1, 0.2], logprobs=[common_pb2.TokenLogprob(rank=1)]
    )
    with pytest.raises(InvalidRequestError, match="2 tokens came with 1 logprobs"):
        decode_event_from_proto(worker_pb2.DecodeEvent(tokens=tokens))
    lame = common_pb2.TokenLogprob(token_id=1, top_token_ids=[1])
    first = worker_pb2.FirstToken(token_ids=[1], logprobs=[lame])
    with pytest.raises(InvalidRequestError, match="1 top_token_ids came with 0"):
        prefill_event_from_proto(worker_pb2.PrefillEvent(first_token=first))
