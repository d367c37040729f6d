from __future__ import annotations

import socket
import threading

from tasuki.engine.frames import FrameReader, encode_frame, from_engine_decoder
from tasuki.engine.transport import QueueTransport, SocketTransport
from tasuki.messages import BeginDrain, FromEngine, MetricSample, MetricSamples


def big_message() -> MetricSamples:
    sample = MetricSample(name="x" * 1000, op="inc", value=1, labels={})
    return MetricSamples(samples=[sample] * 1000)


def test_messages_and_the_end_arrive() -> None:
    ours, theirs = socket.socketpair()
    transport = SocketTransport(theirs)
    ours.sendall(encode_frame(BeginDrain()))
    assert transport.wait(5.0) == [BeginDrain()]
    ours.close()
    assert transport.wait(5.0) is None
    transport.close()


def test_wake_ends_a_wait() -> None:
    ours, theirs = socket.socketpair()
    transport = SocketTransport(theirs)
    transport.wake()
    assert transport.wait(60.0) == []
    transport.close()
    ours.close()


def test_a_slow_reader_never_blocks_the_sender_and_loses_nothing() -> None:
    ours, theirs = socket.socketpair()
    transport = SocketTransport(theirs)
    for _ in range(20):  # far more than the socket holds
        transport.send(big_message())
    received: list[FromEngine] = []
    frames: FrameReader[FromEngine] = FrameReader(from_engine_decoder)

    def read() -> None:
        while len(received) < 20 and (data := ours.recv(1 << 20)):
            received.extend(frames.feed(data))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    while reader.is_alive():
        transport.wait(0.05)
    reader.join(5.0)
    assert received == [big_message()] * 20
    transport.close()
    ours.close()


def test_sending_to_nobody_is_quiet() -> None:
    ours, theirs = socket.socketpair()
    transport = SocketTransport(theirs)
    ours.close()
    transport.send(big_message())
    assert transport.wait(0.0) is None
    transport.close()


def test_the_queue_form_says_the_same() -> None:
    delivered: list[FromEngine] = []
    transport = QueueTransport(delivered.append)
    transport.put(BeginDrain())
    assert transport.wait(5.0) == [BeginDrain()]
    transport.wake()
    assert transport.wait(60.0) == []
    transport.send(big_message())
    assert delivered == [big_message()]
    transport.end()
    assert transport.wait(5.0) is None
