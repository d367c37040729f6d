"""A request whose router dies goes on at another one, or at the same one once it is back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from tasuki.client import Client, GenerateOutput
from tasuki.client.resubmission import ACCEPTED_KEY, LAST_PAUSE, Resubmission, is_loss
from tasuki.errors import ConfigError, DeadlineError, UnavailableError
from tasuki.messages import FinishReason
from tasuki.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.waiting import until

LETTERS = "abcdefgh"


class Router(inference_pb2_grpc.InferenceServicer):
    """Says a letter per token, and goes on after what it is told; dies after `dies_after`."""

    def __init__(self, dies_after: int = 99) -> None:
        self.dies_after = dies_after
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.server: Any = None
        self.address = ""

    async def start(self, port: int = 0) -> None:
        self.server = grpc.aio.server()
        inference_pb2_grpc.add_InferenceServicer_to_server(self, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self.server.start()

    async def die(self) -> None:
        await self.server.stop(0.0)

    # writes itself, as the router does; the stubs know only the generator form
    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]
        self.requests.append(request)
        await context.send_initial_metadata(((ACCEPTED_KEY, "1"),))
        first = len(request.outputs[0].token_ids) if request.outputs else 0
        response = inference_pb2.GenerateResponse
        for index in range(first, len(LETTERS)):
            if index >= self.dies_after:
                asyncio.get_running_loop().create_task(self.die())
                await asyncio.Event().wait()
            await context.write(response(index=index, token_ids=[index], text=LETTERS[index]))
        end = common_pb2.FINISH_REASON_LENGTH
        await context.write(response(index=len(LETTERS), finish_reason=end))

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        raise AssertionError("nobody asks")


@asynccontextmanager
async def routers(*made: Router) -> AsyncIterator[str]:
    for router in made:
        await router.start()
    try:
        yield ",".join(router.address for router in made)
    finally:
        for router in made:
            await router.die()


async def ask(client: Client, **options: Any) -> list[GenerateOutput]:
    async with asyncio.timeout(20):
        return [output async for output in client.generate(prompt="x", **options)]


def check(outputs: list[GenerateOutput]) -> None:
    assert [output.index for output in outputs] == list(range(len(LETTERS) + 1))
    assert "".join(output.text for output in outputs) == LETTERS
    assert outputs[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("dies_after", [0, 1, 5, len(LETTERS) - 1])
async def test_another_router_goes_on(dies_after: int) -> None:
    first, second = Router(dies_after), Router()
    async with routers(first, second) as targets, Client(targets) as client:
        check(await ask(client))
        (began,), (went_on,) = first.requests, second.requests
        assert not began.outputs
        assert began.request_id == went_on.request_id != ""
        assert [list(output.token_ids) for output in went_on.outputs] == (
            [list(range(dies_after))] if dies_after else []
        )
        check(await ask(client))  # and the one that works is asked first from now on
        assert len(first.requests) == 1


async def test_the_only_router_is_waited_for_if_it_had_the_request() -> None:
    router = Router(dies_after=3)
    async with routers(router) as target, Client(target) as client:
        asked = asyncio.ensure_future(ask(client))
        await until(lambda: router.requests, "it was asked")
        await router.server.wait_for_termination()
        router.dies_after = 99
        await router.start(int(target.rpartition(":")[2]))
        check(await asked)


async def test_who_was_never_reached_is_not_waited_for() -> None:
    async with Client(["127.0.0.1:1", "127.0.0.1:2"]) as client:
        with pytest.raises(UnavailableError):
            await ask(client)


async def test_a_dead_target_is_passed_over() -> None:
    router = Router()
    async with routers(router) as target, Client(f"127.0.0.1:1,{target}") as client:
        check(await ask(client))


async def test_patience_ends_and_so_does_the_deadline() -> None:
    for options, error in (({}, UnavailableError), ({"timeout": 0.3}, DeadlineError)):
        router = Router(dies_after=2)
        patience = 30.0 if options else 0.2
        async with routers(router) as target, Client(target, resubmit_seconds=patience) as client:
            with pytest.raises(error):
                await ask(client, **options)


async def test_a_refusal_is_the_callers() -> None:
    class Refusing(Router):
        async def Generate(  # type: ignore[override]  # as above
            self, request: Any, context: Any
        ) -> None:
            self.requests.append(request)
            reason = (("tasuki-reason", "no_worker"),)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "none is ready", reason)

    first, second = Refusing(), Router()
    async with routers(first, second) as targets, Client(targets) as client:
        with pytest.raises(UnavailableError) as caught:
            await ask(client)
        assert caught.value.reason == "no_worker"
        assert not second.requests


async def test_no_target_is_a_mistake() -> None:
    with pytest.raises(ConfigError):
        Client(" , ")


def test_samples_are_counted_one_by_one() -> None:
    request = inference_pb2.GenerateRequest(sampling=common_pb2.SamplingParams(n=2))
    attempts = Resubmission(request, 1, 30.0)
    response = inference_pb2.GenerateResponse
    end = common_pb2.FINISH_REASON_STOP
    attempts.note(response(sample_index=1, token_ids=[5, 6]))
    attempts.note(response(sample_index=0, token_ids=[7], finish_reason=end))
    assert not attempts.is_complete
    again = attempts.request()
    assert [(o.sample_index, list(o.token_ids), o.ended) for o in again.outputs] == [
        (0, [7], True),
        (1, [5, 6], False),
    ]
    attempts.note(response(sample_index=1, finish_reason=end))
    assert attempts.is_complete


def rpc_error(code: grpc.StatusCode, reason: str = "") -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*([("tasuki-reason", reason)] if reason else []))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing)


def test_a_patient_client_tries_for_hours() -> None:
    attempts = Resubmission(inference_pb2.GenerateRequest(), 1, 1e6)
    attempts.accepted()
    lost = rpc_error(grpc.StatusCode.UNAVAILABLE)
    pauses = [attempts.pause(lost, float(now)) for now in range(2000)]
    assert pauses[:3] == [0.05, 0.1, 0.2]
    assert pauses[-1] == LAST_PAUSE


@pytest.mark.parametrize(
    ("code", "reason", "loss"),
    [
        (grpc.StatusCode.UNAVAILABLE, "", True),
        (grpc.StatusCode.INTERNAL, "", True),
        (grpc.StatusCode.UNAVAILABLE, "draining", True),
        (grpc.StatusCode.UNAVAILABLE, "no_worker", False),
        (grpc.StatusCode.INTERNAL, "internal", False),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", False),
        (grpc.StatusCode.UNIMPLEMENTED, "", False),
    ],
)
def test_what_is_a_loss(code: grpc.StatusCode, reason: str, loss: bool) -> None:
    assert is_loss(rpc_error(code, reason)) is loss
