"""Worker.Watch on the wire: load reports up, the current prefill workers down."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tasuki.errors import InvalidRequestError
from tasuki.messages import LinkReport, LoadReport, PrefillTarget
from tasuki.v1 import worker_pb2
from tasuki.wire import values

MAX_PREFILL_WORKERS = 4096
LINK_STATES = ("opening", "open", "failed")


@dataclass(frozen=True)
class WorkerReport:
    """What a router hears from a worker: its load, and the facts that do not change."""

    load: LoadReport
    block_size: int  # positions per KV block
    max_model_len: int  # most tokens of prompt and output together
    model_id: str


def watch_request_to_proto(targets: Iterable[PrefillTarget]) -> worker_pb2.WatchRequest:
    return worker_pb2.WatchRequest(
        prefill_workers=[values.target_to_proto(target) for target in targets]
    )


def watch_request_from_proto(request: worker_pb2.WatchRequest) -> list[PrefillTarget]:
    count = len(request.prefill_workers)
    if count > MAX_PREFILL_WORKERS:
        raise InvalidRequestError(
            f"{count} prefill workers are named; expected at most {MAX_PREFILL_WORKERS}"
        )
    return [values.target_from_proto(target) for target in request.prefill_workers]


def report_to_proto(report: WorkerReport) -> worker_pb2.LoadReport:
    load = report.load
    return worker_pb2.LoadReport(
        worker_id=load.worker_id,
        worker_epoch=load.worker_epoch,
        role=values.role_to_proto(load.role),
        ready=load.ready,
        draining=load.draining,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks,
        queued_tokens=load.queued_tokens,
        running=load.running,
        waiting=load.waiting,
        prefill_tokens_per_second=load.prefill_tokens_per_second,
        links=[
            worker_pb2.LinkReport(
                worker_id=link.worker_id, worker_epoch=link.worker_epoch, state=link.state
            )
            for link in load.links
        ],
        block_size=report.block_size,
        max_model_len=report.max_model_len,
        model_id=report.model_id,
    )


def report_from_proto(report: worker_pb2.LoadReport) -> WorkerReport:
    if report.free_blocks > report.total_blocks or not report.block_size:
        raise InvalidRequestError(
            f"a load report of {report.free_blocks} free of {report.total_blocks} blocks of "
            f"{report.block_size} positions is impossible"
        )
    load = LoadReport(
        worker_id=values.name("worker_id", report.worker_id),
        worker_epoch=report.worker_epoch,
        role=values.role_from_proto(report.role),
        ready=report.ready,
        draining=report.draining,
        free_blocks=report.free_blocks,
        total_blocks=report.total_blocks,
        queued_tokens=report.queued_tokens,
        running=report.running,
        waiting=report.waiting,
        prefill_tokens_per_second=values.non_negative(
            "prefill_tokens_per_second", report.prefill_tokens_per_second
        ),
        links=[_link_from_proto(link) for link in report.links],
    )
    return WorkerReport(
        load=load,
        block_size=report.block_size,
        max_model_len=report.max_model_len,
        model_id=report.model_id,
    )


def _link_from_proto(link: worker_pb2.LinkReport) -> LinkReport:
    if link.state not in LINK_STATES:
        raise InvalidRequestError(
            f"link state is {link.state[:64]!r}; expected one of {', '.join(LINK_STATES)}"
        )
    return LinkReport(
        worker_id=values.name("worker_id", link.worker_id),
        worker_epoch=link.worker_epoch,
        state=link.state,
    )
