"""A client of one cluster, or of any one of its processes for `server_info`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc

from tasuki.client.output import GenerateOutput, output_from_proto
from tasuki.client.prompt import ChatMessage, Generation
from tasuki.client.resubmission import Resubmission, is_loss, was_accepted
from tasuki.client.rpc_error import error_from_rpc
from tasuki.client.sampling import SamplingOptions
from tasuki.client.served import ServedModel, ServerDescription, model_from_proto, server_from_proto
from tasuki.client.targets import Targets
from tasuki.errors import DeadlineError
from tasuki.v1 import common_pb2, inference_pb2

RESUBMIT_SECONDS = 30.0


class Client:
    """Use it as an async context manager, or `close` it. Connects with the first call."""

    def __init__(
        self, target: str | Sequence[str], *, resubmit_seconds: float = RESUBMIT_SECONDS
    ) -> None:
        """`target` is host:port, or several routers of one cluster: a list, or with commas.

        A request whose router dies is sent again, to any of them, with what was answered so far,
        and its stream goes on; the death is the caller's only after `resubmit_seconds` in which no
        router took it. 0: at once.
        """
        self._targets = Targets(target)
        self._resubmit_seconds = resubmit_seconds

    @property
    def target(self) -> str:
        return str(self._targets)

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
        await self._targets.close()

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
            request_id=request_id or uuid.uuid4().hex,  # a router must not draw another one
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
            return model_from_proto(
                await self._targets.current.inference.GetModelInfo(request, timeout=timeout)
            )
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
            return server_from_proto(
                await self._targets.current.server.GetServerInfo(request, timeout=timeout)
            )
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
            return int(
                (
                    await self._targets.current.server.ResetPrefixCache(request, timeout=timeout)
                ).blocks
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self.target) from None

    async def _stream(
        self, request: inference_pb2.GenerateRequest, seconds: float | None
    ) -> AsyncGenerator[GenerateOutput, None]:
        clock = asyncio.get_running_loop().time
        deadline = None if seconds is None else clock() + seconds
        attempts = Resubmission(request, len(self._targets), self._resubmit_seconds)
        while True:
            target = self._targets.current
            left = None if deadline is None else max(deadline - clock(), 0.001)
            call = target.inference.Generate(attempts.request(), timeout=left)
            # beside the answers: a call that fails early may never have any metadata
            metadata = asyncio.ensure_future(call.initial_metadata())
            try:
                async for response in call:
                    attempts.note(response)
                    yield output_from_proto(response)
                return
            except grpc.aio.AioRpcError as error:
                if attempts.is_complete and is_loss(error):
                    return
                if metadata.done() and was_accepted(metadata.result()):
                    attempts.accepted()
                pause = attempts.pause(error, clock())
                if pause is None:
                    raise error_from_rpc(error, target.address) from None
                if deadline is not None and clock() + pause >= deadline:
                    raise DeadlineError(
                        f"the deadline comes before a router can be tried again; {target.address}: "
                        f"{error.details()}"
                    ) from None
            finally:
                metadata.cancel()
                call.cancel()  # nothing after a call that is over
            self._targets.lose(target)
            await asyncio.sleep(pause)
