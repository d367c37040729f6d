"""A client of one cluster, or of any one of its processes for `server_info`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc

from tasuki.client.output import GenerateOutput, output_from_proto
from tasuki.client.prompt import ChatMessage, Generation
from tasuki.client.rpc_error import error_from_rpc
from tasuki.client.sampling import SamplingOptions
from tasuki.client.served import ServedModel, ServerDescription, model_from_proto, server_from_proto
from tasuki.v1 import common_pb2, common_pb2_grpc, inference_pb2, inference_pb2_grpc

MAX_MESSAGE_BYTES = 16 << 20
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),  # clusters are reached directly
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


class Client:
    """Use it as an async context manager, or `close` it. Connects with the first call."""

    def __init__(self, target: str) -> None:
        """`target` is host:port."""
        self.target = target
        self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._server = common_pb2_grpc.ServerStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel the calls that still run and return the connection. Idempotent."""
        await self._channel.close()

    def generate(
        self,
        *,
        prompt: str | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[ChatMessage | Mapping[str, str]] | None = None,
        request_id: str | None = None,
        model: str | None = None,
        slo_ttft_ms: float | None = None,
        slo_tpot_ms: float | None = None,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncGenerator[GenerateOutput, None]:
        """Stream the continuation of one prompt: text, token ids, or a conversation.

        `max_tokens`, `temperature` and all else about sampling are in `SamplingOptions`. Yields
        deltas; the last one has finish_reason, usage, timings and placement. With n > 1, deltas of
        the samples are mixed, and each sample's last one has its finish_reason and usage. `timeout`
        is the request's deadline in seconds. Closing the iterator early cancels the call. Raises
        InvalidRequestError at once for what cannot be sent, and the cluster's typed error while
        iterating.
        """
        generation = Generation(
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            messages=messages,
            sampling=sampling,
            request_id=request_id,
            model=model,
            slo_ttft_ms=slo_ttft_ms,
            slo_tpot_ms=slo_tpot_ms,
            priority=priority,
            cache_salt=cache_salt,
        )
        return self._stream(generation.to_proto(), timeout)

    async def model_info(
        self,
        *,
        timeout: float | None = 10.0,  # noqa: ASYNC109  # the call's own deadline, sent along
    ) -> ServedModel:
        """The model that the cluster serves. `timeout` in seconds; None waits for ever."""
        request = inference_pb2.GetModelInfoRequest()
        try:
            return model_from_proto(await self._inference.GetModelInfo(request, timeout=timeout))
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self.target) from None

    async def server_info(
        self,
        *,
        timeout: float | None = 10.0,  # noqa: ASYNC109  # the call's own deadline, sent along
    ) -> ServerDescription:
        """Facts and effective settings of the process that answers. `timeout` in seconds."""
        request = common_pb2.GetServerInfoRequest()
        try:
            return server_from_proto(await self._server.GetServerInfo(request, timeout=timeout))
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self.target) from None

    async def reset_prefix_cache(
        self,
        *,
        timeout: float | None = 10.0,  # noqa: ASYNC109  # the call's own deadline, sent along
    ) -> int:
        """Have the worker, or all workers of the router, forget the KV of prompts computed until
        now. Returns how many blocks could have been shared. `timeout` in seconds.
        """
        request = common_pb2.ResetPrefixCacheRequest()
        try:
            return int((await self._server.ResetPrefixCache(request, timeout=timeout)).blocks)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self.target) from None

    async def _stream(
        self, request: inference_pb2.GenerateRequest, seconds: float | None
    ) -> AsyncGenerator[GenerateOutput, None]:
        call = self._inference.Generate(request, timeout=seconds)
        try:
            async for response in call:
                yield output_from_proto(response)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self.target) from None
        finally:
            call.cancel()  # nothing after a call that is over
