"""The public client against a small Inference service on loopback."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from tasuki.client import ChatMessage, Client, GenerateOutput, TokenLogprob
from tasuki.errors import (
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    QueueFullError,
    TasukiError,
    UnavailableError,
    UnsupportedError,
)
from tasuki.messages import FinishReason
from tasuki.v1 import common_pb2, common_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.waiting import until


class Inference(inference_pb2_grpc.InferenceServicer):
    """Answers three tokens; the request's model names another behaviour."""

    def __init__(self) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.cancelled = 0

    # writes itself, as the router does; the stubs know only the generator form
    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]
        self.requests.append(request)
        try:
            await self._answer(request, context)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _answer(self, request: Any, context: Any) -> None:
        if request.model == "full":
            reason = (("tasuki-reason", "queue_full"),)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room", reason)
        response = inference_pb2.GenerateResponse
        await context.write(
            response(request_id="r", index=0, token_ids=[5, 6], text="he", token_offsets=[0.1, 0.2])
        )
        if request.model == "stop":
            told = common_pb2.TokenLogprob(
                token_id=7, logprob=-0.5, rank=2, top_token_ids=[8], top_logprobs=[-0.25]
            )
            await context.write(response(index=2, token_ids=[7], logprobs=[told]))
            await context.write(response(index=0, prompt_logprobs=[told, told]))
            await context.write(response(index=3, stop_token_id=7, sample_index=2))
            await context.write(response(index=3, stop_string="end"))
        if request.model == "hang":
            await asyncio.Event().wait()
        if request.model == "odd":
            await context.write(response(finish_reason=99))  # type: ignore[arg-type]  # on purpose
        await context.write(
            response(
                request_id="r",
                index=2,
                token_ids=[7],
                text="llo",
                finish_reason=common_pb2.FINISH_REASON_STOP,
                usage=common_pb2.Usage(prompt_tokens=4, completion_tokens=3),
                timings=inference_pb2.Timings(ttft=0.5, hop=0.1, slo_result="met"),
                placement=inference_pb2.PlacementInfo(kind="split", prefill_worker_id="p1"),
            )
        )

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        return inference_pb2.GetModelInfoResponse(
            model="tiny", max_model_len=256, vocab_size=100, has_chat_template=True, setup="split"
        )


class Server(common_pb2_grpc.ServerServicer):
    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return common_pb2.GetServerInfoResponse(
            role=common_pb2.ROLE_ROUTER, version="9.9", facts={"workers": "[]"}
        )

    async def ResetPrefixCache(self, request: Any, context: Any) -> Any:
        return common_pb2.ResetPrefixCacheResponse(blocks=7)


@asynccontextmanager
async def cluster() -> AsyncIterator[tuple[Inference, Client]]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    inference = Inference()
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)
    common_pb2_grpc.add_ServerServicer_to_server(Server(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with Client(f"127.0.0.1:{port}") as client:
            yield inference, client
    finally:
        await server.stop(None)


async def all_of(stream: AsyncIterator[GenerateOutput]) -> list[GenerateOutput]:
    return [output async for output in stream]


async def test_deltas_and_the_last_word() -> None:
    async with cluster() as (_, client):
        first, last = await all_of(client.generate(prompt="hi", max_tokens=3))
        assert (first.token_ids, first.text, first.index) == ((5, 6), "he", 0)
        assert first.token_offsets == (0.1, 0.2)
        assert (first.finish_reason, first.usage, first.timings, first.placement) == (None,) * 4
        assert (last.index, last.finish_reason) == (2, FinishReason.STOP)
        assert last.usage is not None
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (4, 3)
        assert last.timings is not None
        assert (last.timings.ttft, last.timings.hop, last.timings.slo_result) == (0.5, 0.1, "met")
        assert last.placement is not None
        assert (last.placement.kind, last.placement.prefill_worker_id) == ("split", "p1")
        assert last.request_id == "r"


async def test_what_is_sent() -> None:
    async with cluster() as (inference, client):
        turns: list[Any] = [ChatMessage("system", "be kind"), {"role": "user", "content": "hi"}]
        await all_of(client.generate(messages=turns))
        await all_of(
            client.generate(
                prompt_token_ids=[1, 2],
                max_tokens=9,
                temperature=0.5,
                seed=0,
                ignore_eos=True,
                request_id="mine",
                model="tiny",
                slo_ttft_ms=100,
            )
        )
        chat, ids = inference.requests
        assert [(m.role, m.content) for m in chat.messages.messages] == [
            ("system", "be kind"),
            ("user", "hi"),
        ]
        assert not chat.sampling.ByteSize()  # nothing given: all is left to the cluster
        assert not chat.sampling.HasField("max_tokens")
        assert not chat.sampling.HasField("seed")
        assert not chat.slo.HasField("ttft_ms")
        assert list(ids.token_ids.ids) == [1, 2]
        assert (ids.sampling.max_tokens, ids.sampling.temperature) == (9, 0.5)
        assert ids.sampling.HasField("seed")
        assert ids.sampling.ignore_eos
        assert (ids.request_id, ids.model, ids.slo.ttft_ms) == ("mine", "tiny", 100)
        assert not ids.slo.HasField("tpot_ms")


async def test_logprobs_and_why_it_stopped() -> None:
    async with cluster() as (inference, client):
        outputs = await all_of(client.generate(prompt="a", model="stop", stop="end"))
        told = TokenLogprob(7, -0.5, 2, {8: -0.25})
        assert outputs[1].logprobs == (told,)
        assert outputs[2].prompt_logprobs == (told, told)
        assert [output.stop_reason for output in outputs[2:5]] == [None, 7, "end"]
        assert [output.sample_index for output in outputs[2:5]] == [0, 2, 0]
        assert list(inference.requests[0].sampling.stop) == ["end"]


async def test_an_empty_prompt_is_a_prompt_and_the_cluster_decides() -> None:
    async with cluster() as (inference, client):
        await all_of(client.generate(prompt=""))
        await all_of(client.generate(prompt_token_ids=[]))
        assert [r.WhichOneof("prompt") for r in inference.requests] == ["text", "token_ids"]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"prompt": "a", "prompt_token_ids": [1]},
        {"prompt": "a", "max_tokens": -1},
        {"prompt": "a", "max_tokens": 1 << 40},
        {"prompt": "a", "seed": -1},
        {"prompt": "a", "top_k": -1},
        {"prompt": "a", "top_p": "most"},
        {"prompt": "a", "logit_bias": {-1: 1.0}},
        {"prompt": "a", "stop": [7]},
        {"prompt": "a", "no_such_option": 1},
        {"prompt_token_ids": [-1]},
        {"prompt_token_ids": ["x"]},
        {"messages": ["just text"]},
        {"messages": [{"role": "user"}]},
        {"prompt": 7},
    ],
)
async def test_what_cannot_be_sent_is_refused_at_once(arguments: dict[str, Any]) -> None:
    async with cluster() as (inference, client):
        with pytest.raises(InvalidRequestError):
            client.generate(**arguments)
        assert inference.requests == []


async def test_the_clusters_error_comes_back_typed() -> None:
    async with cluster() as (_, client):
        with pytest.raises(QueueFullError, match=r"^no room$") as caught:
            await all_of(client.generate(prompt="a", model="full"))
        assert caught.value.reason == "queue_full"


async def test_a_deadline() -> None:
    async with cluster() as (_, client):
        stream = client.generate(prompt="a", model="hang", timeout=0.2)
        assert (await anext(stream)).token_ids == (5, 6)
        with pytest.raises(DeadlineError):
            await anext(stream)


async def test_nobody_there_names_the_target() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
            await all_of(client.generate(prompt="a"))
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
            await client.server_info()


async def test_closing_the_iterator_cancels_the_call() -> None:
    async with cluster() as (inference, client):
        stream = client.generate(prompt="a", model="hang")
        await anext(stream)
        await stream.aclose()
        await until(lambda: inference.cancelled == 1, "the server sees the cancel")


async def test_leaving_the_loop_cancels_the_call() -> None:
    async with cluster() as (inference, client):
        async for _ in client.generate(prompt="a", model="hang"):
            break
        gc.collect()  # not needed in CPython, where the iterator is closed as it is dropped
        await until(lambda: inference.cancelled == 1, "the server sees the cancel")


async def test_closing_the_client_cancels_its_calls() -> None:
    async with cluster() as (inference, client):
        stream = client.generate(prompt="a", model="hang")
        await anext(stream)
        await client.close()
        with pytest.raises((CancelledError, asyncio.CancelledError)):
            await anext(stream)
        await until(lambda: inference.cancelled == 1, "the server sees the cancel")


async def test_an_unknown_finish_reason_is_an_error_not_a_guess() -> None:
    async with cluster() as (_, client):
        with pytest.raises(TasukiError, match="newer than this client"):
            await all_of(client.generate(prompt="a", model="odd"))


async def test_model_and_server() -> None:
    async with cluster() as (_, client):
        model = await client.model_info()
        assert (model.model, model.max_model_len, model.setup) == ("tiny", 256, "split")
        assert model.has_chat_template
        server = await client.server_info()
        assert (server.role, server.version, server.facts) == ("router", "9.9", {"workers": "[]"})
        assert await client.reset_prefix_cache() == 7


async def test_a_process_that_is_no_router() -> None:
    server = grpc.aio.server()
    common_pb2_grpc.add_ServerServicer_to_server(Server(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with Client(f"127.0.0.1:{port}") as client:
        with pytest.raises(UnsupportedError):
            await client.model_info()
    await server.stop(None)
