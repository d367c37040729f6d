"""Links' control streams between two servers with two fake engines, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from tasuki.messages import (
    Abandoned,
    Announce,
    CloseLink,
    Commit,
    ErrorStatus,
    Heartbeat,
    LinkAccept,
    LinkClosed,
    LinkEnded,
    LinkHello,
    LinkMessage,
    LinkReceived,
    LinkSend,
    LinkStarted,
    OpenLink,
    Posted,
    PrefillTarget,
    Role,
)
from tasuki.server.status import error_from_rpc
from tasuki.v1 import worker_pb2
from tasuki.wire.link import link_frame_to_proto
from tests.server.fake_engine import LAYOUT, FakeEngine
from tests.server.running_worker import RunningWorker, rpc_error, running
from tests.waiting import until

LINK = "c" * 32
HELLO = LinkHello(
    token=b"t" * 32, decode_worker_id="d", decode_epoch=2, prefill_worker_id="p", prefill_epoch=1,
    layout=LAYOUT, connector="gloo", digest="xxh3", max_segment_bytes=1 << 20,
)  # fmt: skip
ACCEPT = LinkAccept(token=b"u" * 32, layout=LAYOUT, digest="xxh3", max_segment_bytes=1 << 20)


def say(engine: FakeEngine, message: LinkMessage) -> None:
    engine.say(LinkSend(link_id=LINK, message=message))


def heard(engine: FakeEngine) -> list[LinkMessage]:
    return [m.message for m in engine.all(LinkReceived)]


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[RunningWorker, RunningWorker]]:
    """A prefill and a decode worker with one open link."""
    async with running(Role.PREFILL, epoch=1) as prefill, running(Role.DECODE) as decode:
        decode.engine.say(OpenLink(link_id=LINK, target=prefill.target))
        say(decode.engine, HELLO)
        await prefill.engine.wait_for(LinkReceived)
        yield prefill, decode


async def test_frames_travel_both_ways_in_order() -> None:
    async with linked() as (prefill, decode):
        assert prefill.engine.heard[0] == LinkStarted(link_id=LINK)
        assert heard(prefill.engine) == [HELLO]
        down: list[LinkMessage] = [ACCEPT]
        down += [
            Announce(link_seq=n, handoff_id="a" * 32, first_block=n, count=1, nbytes=64, digest=n)
            for n in range(50)
        ]
        down += [Commit(handoff_id="a" * 32, tokens=800, blocks=50), Heartbeat(steps=3, age=0.1)]
        up: list[LinkMessage] = [Posted(link_seq=n) for n in range(50)]
        for message in down:
            say(prefill.engine, message)
        for message in up:
            say(decode.engine, message)
        await decode.engine.wait_for(LinkReceived, len(down))
        await prefill.engine.wait_for(LinkReceived, 1 + len(up))
        assert heard(decode.engine) == down
        assert heard(prefill.engine) == [HELLO, *up]


async def test_the_decode_side_closes_after_its_last_words() -> None:
    async with linked() as (prefill, decode):
        for n in range(20):
            say(decode.engine, Posted(link_seq=n))
        say(decode.engine, LinkClosed(reason="done"))
        decode.engine.say(CloseLink(link_id=LINK, error=None))
        assert (await prefill.engine.wait_for(LinkEnded)).error is None
        assert heard(prefill.engine)[-1] == LinkClosed(reason="done")
        assert len(heard(prefill.engine)) == 22
        await until(lambda: not len(decode.server.links), "the stream is returned")
        assert decode.engine.all(LinkEnded) == []  # its own engine ended it


async def test_the_prefill_side_closes_with_an_error() -> None:
    async with linked() as (prefill, decode):
        layout = ErrorStatus(code="FAILED_PRECONDITION", reason="layout", message="differ in dtype")
        say(prefill.engine, LinkClosed(reason="layout"))
        prefill.engine.say(CloseLink(link_id=LINK, error=layout))
        assert (await decode.engine.wait_for(LinkEnded)).error == layout
        assert heard(decode.engine) == [LinkClosed(reason="layout")]
        assert prefill.engine.all(LinkEnded) == []


async def test_a_dead_prefill_engine_ends_the_stream_at_once() -> None:
    async with linked() as (prefill, decode):
        prefill.engine.die()
        error = (await decode.engine.wait_for(LinkEnded)).error
        assert error is not None
        assert (error.code, error.reason) == ("UNAVAILABLE", "engine_died")


async def test_a_dead_decode_engine_ends_the_stream_at_once() -> None:
    async with linked() as (prefill, decode):
        decode.engine.die()
        await prefill.engine.wait_for(LinkEnded)


async def test_a_decode_worker_that_vanishes_is_seen() -> None:
    async with running(Role.PREFILL, epoch=1) as prefill:
        call = prefill.stub.Link()
        await call.write(link_frame_to_proto(LINK, HELLO))
        await prefill.engine.wait_for(LinkReceived)
        call.cancel()
        assert (await prefill.engine.wait_for(LinkEnded)).link_id == LINK


async def test_nobody_there() -> None:
    async with running(Role.DECODE) as decode:
        nowhere = PrefillTarget(worker_id="gone", worker_epoch=1, address="127.0.0.1:1")
        decode.engine.say(OpenLink(link_id=LINK, target=nowhere))
        say(decode.engine, HELLO)
        error = (await decode.engine.wait_for(LinkEnded)).error
        assert error is not None
        assert error.code == "UNAVAILABLE"
        say(decode.engine, Posted(link_seq=0))  # late: dropped
        decode.engine.say(CloseLink(link_id=LINK, error=None))


@pytest.mark.parametrize(
    ("frames", "word"),
    [
        ([link_frame_to_proto(LINK, Posted(link_seq=0))], "expected LinkHello"),
        ([worker_pb2.LinkFrame(link_id="no")], "link_id"),
        ([link_frame_to_proto(LINK, HELLO), worker_pb2.LinkFrame(link_id=LINK)], "no message"),
        (
            [
                link_frame_to_proto(LINK, HELLO),
                link_frame_to_proto("d" * 32, Abandoned(handoff_id="a" * 32, reason="link")),
            ],
            "came on the stream of",
        ),
    ],
)
async def test_nonsense_ends_the_stream_with_a_word(
    frames: list[worker_pb2.LinkFrame], word: str
) -> None:
    async with running(Role.PREFILL) as prefill:

        async def send() -> AsyncIterator[worker_pb2.LinkFrame]:
            for frame in frames:
                yield frame
            await asyncio.Event().wait()  # stay: the server is to end it

        error = await rpc_error(prefill.stub.Link(send(), timeout=10))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert word in str(error.details())
        starts, ends = prefill.engine.all(LinkStarted), prefill.engine.all(LinkEnded)
        assert len(starts) == len(ends)


async def test_a_link_id_cannot_be_used_twice() -> None:
    async with linked() as (prefill, _):
        call = prefill.stub.Link(timeout=10)
        await call.write(link_frame_to_proto(LINK, HELLO))
        code = await call.code()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert len(prefill.engine.all(LinkStarted)) == 1


async def test_a_decode_worker_serves_no_links() -> None:
    async with running(Role.DECODE) as decode:
        call = decode.stub.Link(timeout=10)
        error = error_from_rpc(await rpc_error(call))
        assert error.reason == "wrong_role"


async def test_silence_instead_of_a_hello_has_a_deadline() -> None:
    async with running(Role.PREFILL) as prefill:
        prefill.server.links._hello_timeout = 0.05
        error = await rpc_error(prefill.stub.Link(timeout=10))
        assert "no LinkHello" in str(error.details())


async def test_closing_the_worker_ends_its_links_for_both() -> None:
    async with running(Role.DECODE) as decode:
        async with running(Role.PREFILL, epoch=1) as prefill:
            decode.engine.say(OpenLink(link_id=LINK, target=prefill.target))
            say(decode.engine, HELLO)
            await prefill.engine.wait_for(LinkReceived)
        error = (await decode.engine.wait_for(LinkEnded)).error
        assert error is not None
        assert error.reason == "draining"
