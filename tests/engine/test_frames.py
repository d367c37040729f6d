from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.engine.frames import (
    MAX_FRAME_BYTES,
    FrameReader,
    encode_frame,
    from_engine_decoder,
    to_engine_decoder,
)
from tasuki.messages import (
    CancelStream,
    DecodeRequest,
    FinishReason,
    LinkReceived,
    PrefillTarget,
    Received,
    SamplingParams,
    StartDecode,
    StreamEvent,
    StreamEvents,
    ToEngine,
    TokensEvent,
)

MESSAGES: list[ToEngine] = [
    StartDecode(
        stream_id=1,
        request=DecodeRequest(
            request_id="r",
            prompt_token_ids=[1, 2, 3],
            output_token_ids=[],
            sampling=SamplingParams(seed=2**64 - 1),
            prefill_candidates=[
                PrefillTarget(worker_id="p", worker_epoch=2**64 - 1, address="a:1")
            ],
        ),
    ),
    CancelStream(stream_id=1, reason=FinishReason.CANCELLED),
    LinkReceived(link_id="l", message=Received(link_seq=7, ok=False)),
]


@given(cuts=st.lists(st.integers(1, 40), max_size=30))
def test_frames_survive_any_cutting(cuts: list[int]) -> None:
    data = b"".join(encode_frame(message) for message in MESSAGES)
    reader: FrameReader[ToEngine] = FrameReader(to_engine_decoder)
    out: list[ToEngine] = []
    for cut in cuts:
        out += reader.feed(data[:cut])
        data = data[cut:]
    out += reader.feed(data)
    assert out == MESSAGES


def test_events_of_one_step_travel_in_one_frame() -> None:
    event = TokensEvent(index=0, token_ids=[5], offsets=[0.5])
    message = StreamEvents(events=[StreamEvent(stream_id=i, event=event) for i in range(3)])
    assert FrameReader(from_engine_decoder).feed(encode_frame(message)) == [message]


def test_a_frame_that_claims_too_much_is_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        FrameReader(to_engine_decoder).feed(struct.pack("<I", MAX_FRAME_BYTES + 1))
