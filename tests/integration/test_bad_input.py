"""Bad input gets a clear error, and a request that runs beside it is not disturbed."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from cli.cluster.local_cluster import LocalCluster
from tasuki.client import Client
from tasuki.errors import InvalidRequestError, RequestTooLongError, TasukiError, UnknownModelError
from tasuki.messages import Role
from tasuki.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tests.integration.streams import ask, prompt

pytestmark = [pytest.mark.dist, pytest.mark.asyncio(loop_scope="session")]

BAD: list[tuple[dict[str, Any], type[TasukiError], str]] = [
    ({"prompt_token_ids": []}, InvalidRequestError, "empty"),
    ({"prompt": ""}, InvalidRequestError, "empty"),
    ({"messages": []}, InvalidRequestError, "message"),
    ({"prompt_token_ids": prompt(3000)}, RequestTooLongError, "3000"),
    ({"prompt_token_ids": [70], "max_tokens": 0}, InvalidRequestError, "max_tokens"),
    ({"prompt_token_ids": [70], "max_tokens": -1}, InvalidRequestError, "max_tokens"),
    ({"prompt_token_ids": [70], "max_tokens": 1 << 31}, InvalidRequestError, "max_tokens"),
    ({"prompt_token_ids": [70], "temperature": float("nan")}, InvalidRequestError, "temperature"),
    ({"prompt_token_ids": [70], "temperature": -0.5}, InvalidRequestError, "temperature"),
    ({"prompt_token_ids": [70], "temperature": float("inf")}, InvalidRequestError, "temperature"),
    ({"prompt_token_ids": [70], "top_p": 0.0}, InvalidRequestError, "top_p is 0"),
    ({"prompt_token_ids": [70], "logit_bias": {260: 1.0}}, InvalidRequestError, "token 260"),
    ({"prompt_token_ids": [70], "stop": ""}, InvalidRequestError, "a stop has 0"),
    ({"prompt_token_ids": [70], "logprobs": 21}, InvalidRequestError, "logprobs is 21"),
    ({"prompt_token_ids": [260]}, InvalidRequestError, "260"),
    ({"prompt_token_ids": [-1]}, InvalidRequestError, "token id"),
    ({"prompt_token_ids": [70], "model": "gpt-9"}, UnknownModelError, "gpt-9"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, InvalidRequestError, "wizard|role"),
]


async def test_bad_input_is_refused_and_disturbs_nobody(split: LocalCluster) -> None:
    async with Client(split.router_address) as client:
        alone = await ask(client, prompt(120))
        beside = asyncio.ensure_future(ask(client, prompt(120)))
        for arguments, error, words in BAD:
            with pytest.raises(error, match=words):
                async for _ in client.generate(**arguments):
                    pass
        assert (await beside).token_ids == alone.token_ids


def hostile_sampling() -> list[common_pb2.SamplingParams]:
    """What no client of ours would send."""
    nan, inf = float("nan"), float("inf")
    values: list[dict[str, Any]] = [
        {"min_tokens": 4}, {"min_tokens": 2**32 - 1}, {"temperature": inf}, {"temperature": 1e-300},
        {"top_p": nan}, {"top_p": -1.0}, {"min_p": 1.0}, {"min_p": nan},
        {"repetition_penalty": 0.0}, {"repetition_penalty": inf}, {"presence_penalty": nan},
        {"frequency_penalty": 1e300}, {"logit_bias": {2**32 - 1: 1.0}}, {"logit_bias": {5: nan}},
        {"logit_bias": dict.fromkeys(range(100_000), 1.0)}, {"stop_token_ids": [260]},
        {"stop_token_ids": range(100_000)}, {"logprobs": 2**32 - 1}, {"prompt_logprobs": 21},
        {"stop": ["x"]}, {"stop": ["x" * 100_000] * 20},
    ]  # fmt: skip
    return [common_pb2.SamplingParams(**{"max_tokens": 3, "seed": 1} | one) for one in values]


async def test_a_prefill_worker_refuses_hostile_sampling(split: LocalCluster) -> None:
    """Before it looks at the link, and also on one that does not exist."""
    (prefill,) = split.workers_of(Role.PREFILL)
    async with grpc.aio.insecure_channel(prefill.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        for hostile in hostile_sampling():
            request = worker_pb2.PrefillRequest(
                request_id="r", handoff_id="0" * 32, link_id="0" * 32, decode_worker_id="d",
                prompt_token_ids=[7] * 70, sampling=hostile,
            )  # fmt: skip
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Prefill(request):
                    pass
            assert caught.value.code() is not grpc.StatusCode.INTERNAL
    async with Client(split.router_address) as client:
        answer = await ask(client, prompt(120))
        assert (len(answer.token_ids), answer.placement.kind) == (64, "split")


async def test_a_worker_refuses_bad_input_by_itself(split: LocalCluster) -> None:
    """A stranger that calls a decode worker directly must not crash its engine."""
    (decode,) = split.workers_of(Role.DECODE)
    sampling = common_pb2.SamplingParams(max_tokens=3, seed=1)
    bad = [
        worker_pb2.DecodeRequest(request_id="a", sampling=sampling),
        worker_pb2.DecodeRequest(request_id="b", prompt_token_ids=[10**9], sampling=sampling),
        worker_pb2.DecodeRequest(request_id="c", prompt_token_ids=[7] * 5000, sampling=sampling),
        worker_pb2.DecodeRequest(
            request_id="d", prompt_token_ids=[7], output_token_ids=[10**9], sampling=sampling
        ),
        worker_pb2.DecodeRequest(
            request_id="e",
            prompt_token_ids=[7] * 70,
            sampling=common_pb2.SamplingParams(max_tokens=3, seed=1, temperature=float("nan")),
        ),
    ]
    bad += [
        worker_pb2.DecodeRequest(request_id=str(n), prompt_token_ids=[7] * 70, sampling=hostile)
        for n, hostile in enumerate(hostile_sampling())
    ]
    async with grpc.aio.insecure_channel(decode.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        for request in bad:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Decode(request):
                    pass
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, request.request_id
    async with Client(split.router_address) as client:
        assert len((await ask(client, prompt(120))).token_ids) == 64
