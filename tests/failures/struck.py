"""A live split cluster that tests strike, and its requests: each is brought into a state and held
there until the blow has fallen.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from cli.cluster.local_cluster import LocalCluster
from cli.cluster.ready_line import ReadyLine
from tasuki.client import Client
from tasuki.messages import (
    DecodeRequest,
    LocalEvent,
    PrefillTarget,
    Role,
    SamplingParams,
    TokensEvent,
)
from tasuki.server.grpc_server import internal_channel
from tasuki.v1 import worker_pb2_grpc
from tasuki.wire.decode import decode_event_from_proto, decode_request_to_proto
from tests.integration.faults import CRAWL, inject
from tests.integration.scrape import Metrics, assert_no_leaks, scrape, scrape_until
from tests.integration.streams import NUM_TOKENS, Answer, ask, prompt
from tests.leftovers import adopt

PROMPT = prompt(1500, seed="struck")  # 94 blocks
NEXT = prompt(100, seed="struck and mended")
STREAM = prompt(200, seed="stream")
HOG = prompt(16, seed="hog")  # will need 125 blocks: no other prompt is let in before it has them
BIG = prompt(1100, seed="big")  # leaves 91 blocks
LONG = 800  # output tokens: so many that there is an "amid"
SECONDS = 60.0
CUT = 1e-3  # bytes a second: nothing
PEER_TIMEOUT = 1.5
REPORT_TIMEOUT = 2.0
DEATH_SECONDS = 1.0  # in which a death is noticed
LOOK_SECONDS = (
    0.7  # what an engine's next look, a report and a scrape of ours may take on a busy core
)
STATES = ("queued", "reserved", "dispatched", "transferring", "committed", "abandoned")


class Asked:
    """One request under way: its tokens so far, and its answer to come."""

    def __init__(self, client: Client, what: str, token_ids: Sequence[int], **options: Any) -> None:
        self.what = what
        self.tokens: list[int] = []
        self._task = asyncio.ensure_future(ask(client, token_ids, into=self.tokens, **options))

    async def answer(self) -> Answer:
        """Raises what ended it."""
        async with asyncio.timeout(SECONDS):
            answer = await self._task
        print(f"{self.what}: the longest stall was {answer.stall:.2f} s")
        return answer

    async def cancel(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def has_tokens(self, count: int = 1) -> None:
        """Wait for `count` of its tokens."""
        async with asyncio.timeout(SECONDS):
            while len(self.tokens) < count:
                assert not self._task.done(), self._task
                await asyncio.sleep(0)


class Struck:
    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.client = Client(cluster.router_address)  # another one for each test
        self._expected: dict[str, list[int]] = {}

    @property
    def prefill(self) -> ReadyLine:
        return self.cluster.workers_of(Role.PREFILL)[0]

    @property
    def decode(self) -> ReadyLine:
        return self.cluster.workers_of(Role.DECODE)[0]

    # --- requests -------------------------------------------------------------------------------

    def ask(self, what: str, token_ids: Sequence[int] = PROMPT, **options: Any) -> Asked:
        return Asked(self.client, what, token_ids, **options)

    async def expected(self, token_ids: Sequence[int] = PROMPT, **options: Any) -> list[int]:
        """What the cluster says while nothing happens to it. Asked once."""
        key = repr((token_ids, sorted(options.items())))
        if key not in self._expected:
            answer = await ask(self.client, token_ids, **options)
            assert (answer.placement.kind, answer.placement.fallback_reason) == ("split", "")
            self._expected[key] = answer.token_ids
            await self.all_home()  # and the router knows
        return self._expected[key]

    async def ask_decode_worker(
        self, token_ids: Sequence[int], candidates: Sequence[PrefillTarget] = ()
    ) -> tuple[list[int], str]:
        """As a router would that has these prefill workers in mind; the tokens, and why they were
        computed there alone, if they were. Raises AioRpcError.
        """
        request = DecodeRequest(
            request_id="direct",
            prompt_token_ids=list(token_ids),
            output_token_ids=[],
            sampling=SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
            prefill_candidates=list(candidates),
        )
        tokens, local = [], ""
        async with internal_channel(self.decode.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            call = stub.Decode(decode_request_to_proto(request), timeout=SECONDS)
            async for message in call:
                match decode_event_from_proto(message):
                    case TokensEvent() as event:
                        tokens += event.token_ids
                    case LocalEvent() as event:
                        local = event.reason
        return tokens, local

    # --- blows ----------------------------------------------------------------------------------

    async def target(self, worker: ReadyLine) -> tuple[int, int]:
        """Process id and epoch of the engine of now."""
        async with Client(worker.address, resubmit_seconds=0.0) as client:
            server = await client.server_info()
        return server.engine_pid, server.worker_epoch

    async def signal_engine(self, worker: ReadyLine, number: signal.Signals) -> None:
        os.kill((await self.target(worker))[0], number)

    @contextlib.asynccontextmanager
    async def stopped(self, worker: ReadyLine) -> AsyncIterator[int]:
        """Its engine does not run within the block, unless it is another one by then."""
        pid, _ = await self.target(worker)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    @contextlib.asynccontextmanager
    async def slowed(self, bytes_per_second: float) -> AsyncIterator[None]:
        """The prefill worker's links let no more through within the block."""
        await inject(self.prefill, "slow", bytes_per_second)
        try:
            yield
        finally:
            with contextlib.suppress(grpc.aio.AioRpcError):  # a new engine begins without faults
                await inject(self.prefill, "slow", 0.0)

    async def restart(self, process: ReadyLine, **changes: Any) -> None:
        """Kill it with all that it started, and start it on the same address."""
        self.cluster.kill(process)
        again = await self.cluster.restart(process, **changes)
        assert again.address == process.address
        adopt(again.pid)

    # --- states ---------------------------------------------------------------------------------

    async def until(
        self, process: ReadyLine, wanted: Callable[[Metrics], bool], what: str
    ) -> Metrics:
        return await scrape_until(process.metrics, wanted, what, SECONDS / 2)

    async def noticed(
        self, process: ReadyLine, counter: str, before: float, within: float, **labels: str
    ) -> None:
        """A death, or a silence, that has just begun shows in a counter of `process` in time."""
        begin = time.monotonic()
        await self.until(process, lambda m: m.total(counter, **labels) > before, counter)
        seconds = time.monotonic() - begin
        print(f"{counter} {labels}: noticed after {seconds:.2f} s")
        assert seconds < within

    async def until_handoff(self, state: str) -> None:
        await self.until(
            self.decode, lambda m: m.total("handoffs", state=state) == 1, f"one that is {state}"
        )

    async def until_gone(self, state: str) -> None:
        """Wait until nobody knows of the request that was in `state`, but whoever is stopped."""
        if state == "queued":
            await self.until(
                self.cluster.router, lambda m: m.total("admission_queue_requests") == 0, "no queue"
            )
        else:
            await self.until(
                self.decode, lambda m: m.total("handoffs", state=state) == 0, f"none {state}"
            )

    async def until_more_kv(self, before: Metrics) -> None:
        """Some of it has been received since."""
        had = before.total("kv_received_bytes_total")
        await self.until(self.decode, lambda m: m.total("kv_received_bytes_total") > had, "some KV")

    @contextlib.asynccontextmanager
    async def held(self, state: str, what: str, **options: Any) -> AsyncIterator[Asked]:
        """A request that is in `state` and would stay there for a while; whatever holds it lets go
        at the end of the block.
        """
        async with contextlib.AsyncExitStack() as stack:
            before = await scrape(self.decode.metrics)
            if state in ("queued", "reserved"):
                token_ids, most = (BIG, 940) if state == "queued" else (HOG, 1984)
                hog = self.ask("hog", token_ids, max_tokens=most)
                stack.push_async_callback(hog.cancel)
                await hog.has_tokens(2)  # it is in the batch now, and will grow
            elif state == "dispatched":
                await stack.enter_async_context(self.stopped(self.prefill))
            elif state == "transferring":
                await stack.enter_async_context(self.slowed(CRAWL))
            elif state == "abandoned":
                await inject(self.decode, "corrupt", 1.0)
            asked = self.ask(what, **options)
            stack.push_async_callback(asked.cancel)
            await self._until_in(state, asked, before)
            yield asked

    async def _until_in(self, state: str, asked: Asked, before: Metrics) -> None:
        if state == "queued":
            await self.until(
                self.cluster.router, lambda m: m.total("admission_queue_requests") == 1, "a queue"
            )
        elif state == "transferring":
            await self.until_more_kv(before)
        elif state in ("committed", "abandoned"):
            await asked.has_tokens(4)
        if state != "queued":
            await self.until_handoff(state)

    # --- after it -------------------------------------------------------------------------------

    async def all_home(self) -> float:
        """Wait until no worker has anything to do or holds a block; when that was seen."""
        for worker in self.cluster.workers:
            await assert_no_leaks(worker.metrics)
        return time.monotonic()

    async def mended(self) -> None:
        """Every block home, the links healthy, and a further request goes as it should."""
        await self.cluster.wait_ready()
        await self.all_home()
        expected = await self.expected(NEXT)
        until = time.monotonic() + SECONDS
        while True:
            answer = await ask(self.client, NEXT)
            assert answer.token_ids == expected
            assert answer.placement.fallback_reason == ""
            if answer.placement.kind == "split":
                break
            assert time.monotonic() < until, answer.placement  # the router knew of no link yet
        await self.all_home()
