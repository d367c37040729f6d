"""The workers a router knows: a fixed list of addresses, each followed by its Watch stream.

Tells decode workers which prefill workers there are; knows nothing about requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Callable

import grpc

from router.workers.watched_worker import WatchedWorker, WatchLimits, WorkerState
from router.workers.worker_snapshot import WorkerSnapshot
from tasuki.errors import UnavailableError
from tasuki.messages import Role

Connect = Callable[[str], grpc.aio.Channel]


class Registry:
    """Calls its subscribers whenever a report arrived or a worker was lost."""

    def __init__(
        self,
        *,
        prefill_addresses: tuple[str, ...],
        decode_addresses: tuple[str, ...],
        model_id: str,
        limits: WatchLimits,
        connect: Connect,
    ) -> None:
        self._subscribers: list[Callable[[], None]] = []
        self._sized = asyncio.Event()  # some decode worker has reported
        roles = [(address, Role.PREFILL) for address in prefill_addresses]
        roles += [(address, Role.DECODE) for address in decode_addresses]
        self._workers = {
            address: WatchedWorker(
                address,
                role,
                connect(address),
                model_id=model_id,
                limits=limits,
                on_change=self._changed,
            )
            for address, role in roles
        }

    def subscribe(self, on_change: Callable[[], None]) -> None:
        """`on_change` is called on the event loop; it must not block."""
        self._subscribers.append(on_change)

    async def start(self) -> None:
        """Begin to follow every worker."""
        for worker in self._workers.values():
            worker.start()

    async def close(self) -> None:
        """End all streams and channels."""
        await asyncio.gather(*(worker.close() for worker in self._workers.values()))

    def worker(self, address: str) -> WatchedWorker:
        return self._workers[address]

    def prefill_worker(self, worker_id: str) -> WatchedWorker | None:
        """The live prefill worker of that name, if there is one."""
        for worker in self._workers.values():
            if worker.role is Role.PREFILL and worker.snapshot.worker_id == worker_id:
                return worker
        return None

    def snapshots(self) -> list[WorkerSnapshot]:
        return [worker.snapshot for worker in self._workers.values()]

    def states(self) -> Counter[tuple[Role, WorkerState]]:
        return Counter((worker.role, worker.state) for worker in self._workers.values())

    def capacity(self) -> int | None:
        """Most tokens of prompt and output that the largest decode worker holds for one request.

        None while no decode worker has reported.
        """
        sizes = [
            worker.max_tokens_per_request
            for worker in self.snapshots()
            if worker.role is Role.DECODE and worker.total_blocks
        ]
        return max(sizes, default=None)

    async def wait_capacity(self, seconds: float) -> None:
        """Until it is known; gives up after `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._sized.wait()

    @property
    def has_decode_worker(self) -> bool:
        return any(worker.role is Role.DECODE and worker.usable for worker in self.snapshots())

    async def reset_prefix_caches(self) -> int:
        """Have every worker forget its cached prefixes. Returns how many blocks all of them had.

        Raises UnavailableError naming the workers that could not be asked; the others did it.
        """
        workers = list(self._workers.values())
        calls = [worker.reset_prefix_cache() for worker in workers]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        failed = [
            f"{worker.role} worker {worker.address}: {answer}"
            for worker, answer in zip(workers, answers, strict=True)
            if isinstance(answer, BaseException)
        ]
        if failed:
            raise UnavailableError(
                f"{len(failed)} of {len(workers)} workers did not reset their prefix cache "
                f"({'; '.join(failed)}); try again"
            )
        return sum(answer for answer in answers if isinstance(answer, int))

    def facts(self) -> dict[str, str]:
        """For GetServerInfo: every worker's state, and open links as "prefill_id->decode_id"."""
        described = []
        links = []
        prefills = {w.identity for w in self.snapshots() if w.role is Role.PREFILL and w.live}
        for worker in self._workers.values():
            seen = worker.snapshot
            described.append(
                {
                    "role": str(worker.role),
                    "worker_id": seen.worker_id,
                    "worker_epoch": f"{seen.worker_epoch:016x}",
                    "address": worker.address,
                    "state": str(worker.state),
                }
            )
            if seen.live:
                links += [f"{name}->{seen.worker_id}" for name, _ in seen.open_links & prefills]
        return {"workers": json.dumps(described), "links": json.dumps(sorted(links))}

    def _changed(self) -> None:
        if not self._sized.is_set() and self.capacity() is not None:
            self._sized.set()
        targets = [
            worker.target
            for worker in self.snapshots()
            if worker.role is Role.PREFILL and worker.live and (worker.ready or worker.draining)
        ]
        for watched in self._workers.values():
            if watched.role is Role.DECODE:
                watched.announce(targets)
        for subscriber in self._subscribers:
            subscriber()
