"""Faults for live workers that were started with `fault_injection`."""

from __future__ import annotations

from cli.cluster.ready_line import ReadyLine
from tasuki.config import WorkerConfig
from tasuki.server.grpc_server import internal_channel
from tasuki.v1 import worker_pb2, worker_pb2_grpc

BLOCK_BYTES = 12288  # of the tiny model: 16 positions
CRAWL = 20 * BLOCK_BYTES  # bytes a second that a slow link lets through

SLOWABLE = WorkerConfig(
    fault_injection=True,
    segment_bytes=1,  # one block
    window_bytes=8 * BLOCK_BYTES,  # what a slow link still owes when nobody wants it any more
    handoff_timeout=30.0,
    peer_timeout=30.0,
)


async def inject(worker: ReadyLine, kind: str, amount: float = 0.0) -> None:
    request = worker_pb2.InjectFaultRequest(kind=kind, amount=amount)
    async with internal_channel(worker.address) as channel:
        await worker_pb2_grpc.WorkerStub(channel).InjectFault(request, timeout=5)
