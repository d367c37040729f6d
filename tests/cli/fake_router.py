"""A router of few words: answers what a test tells it to, over real gRPC on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from tasuki.v1 import common_pb2, common_pb2_grpc, inference_pb2, inference_pb2_grpc

TIMINGS: dict[str, Any] = {
    "ttft": 0.1234567, "tpot": 0.02, "e2e": 0.1634567, "queue": 0.0001, "reservation": 0.0002,
    "prefill_queue": 0.001, "prefill_compute": 0.12, "fallback": 0.0, "hop": 0.0021567,
    "transfer": 0.004, "exposed_transfer": 0.0015, "commit_wait": 0.0005, "first_decode": 0.018,
    "transfer_bytes": 2_000_000, "transfer_blocks": 6, "slo_result": "met",
}  # fmt: skip
PLACEMENT: dict[str, Any] = {
    "kind": "split", "reason": "prefill_available", "decode_worker_id": "decode-0",
    "prefill_worker_id": "prefill-0", "fallback_reason": "", "decode_computed_prompt_tokens": 0,
}  # fmt: skip


def add_logprobs(response: Any, sampling: Any) -> None:
    """What was asked for, always the same."""
    if sampling.HasField("logprobs"):
        token_id = response.token_ids[0]
        response.logprobs.add(
            token_id=token_id, logprob=-0.25, rank=1, top_token_ids=[token_id, 3],
            top_logprobs=[-0.25, -1.5],
        )  # fmt: skip
    if sampling.HasField("prompt_logprobs") and response.index == 0:
        response.prompt_logprobs.add(token_id=4, logprob=-7.5, rank=12)


class FakeRouter(inference_pb2_grpc.InferenceServicer, common_pb2_grpc.ServerServicer):
    """Streams `pieces`, one token each from id 10; keeps the requests it saw."""

    def __init__(
        self,
        *,
        pieces: Sequence[str] = ("Hel", "", "lo"),
        has_chat_template: bool = True,
        error: tuple[grpc.StatusCode, str, str] | None = None,
        facts: Mapping[str, Any] | None = None,
        endless: bool = False,
    ) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.ended = asyncio.Event()
        self._pieces = pieces
        self._has_chat_template = has_chat_template
        self._error = error
        self._facts = facts or {}
        self._endless = endless

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        if self._error is not None:
            code, reason, words = self._error
            await context.abort(code, words, (("tasuki-reason", reason),))
        try:
            samples = range(request.sampling.n or 1)
            for index, piece in enumerate(self._pieces):
                for sample in samples:
                    response = inference_pb2.GenerateResponse(
                        sample_index=sample, index=index, token_ids=[10 + index], text=piece
                    )
                    add_logprobs(response, request.sampling)
                    yield response
            if self._endless:
                await asyncio.Event().wait()
            for sample in samples:
                last = inference_pb2.GenerateResponse(
                    sample_index=sample,
                    index=len(self._pieces),
                    finish_reason=common_pb2.FINISH_REASON_LENGTH,
                    usage=common_pb2.Usage(prompt_tokens=9, completion_tokens=len(self._pieces)),
                )
                if sample == samples[-1]:
                    last.timings.CopyFrom(inference_pb2.Timings(**TIMINGS))
                    last.placement.CopyFrom(inference_pb2.PlacementInfo(**PLACEMENT))
                yield last
        finally:
            self.ended.set()

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        return inference_pb2.GetModelInfoResponse(
            model="fake", has_chat_template=self._has_chat_template
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        facts = {key: json.dumps(value) for key, value in self._facts.items()}
        return common_pb2.GetServerInfoResponse(role=common_pb2.ROLE_ROUTER, facts=facts)

    async def ResetPrefixCache(self, request: Any, context: Any) -> Any:
        return common_pb2.ResetPrefixCacheResponse()


@asynccontextmanager
async def serving(router: FakeRouter) -> AsyncIterator[str]:
    """Serve on a free port; gives host:port."""
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(router, server)
    common_pb2_grpc.add_ServerServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
