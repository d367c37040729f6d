"""Turns whatever a handler raises into a status, so that handlers only raise typed errors.

An error that is not typed is a bug: it is logged here in full and leaves as INTERNAL, without its
text.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from tasuki.errors import TasukiError
from tasuki.server.status import abort

log = logging.getLogger(__name__)
CallContext = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, CallContext], Any]


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every method of a server."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        make, behaviour = _parts_of(handler)
        wrap = _guard_generator if inspect.isasyncgenfunction(behaviour) else _guard_coroutine
        return make(  # type: ignore[no-any-return]  # the stubs type the four makers loosely
            wrap(behaviour, handler_call_details.method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _parts_of(handler: Any) -> tuple[Callable[..., Any], Behaviour]:
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler, handler.stream_stream
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler, handler.stream_unary
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler, handler.unary_stream
    return grpc.unary_unary_rpc_method_handler, handler.unary_unary


def _guard_coroutine(behaviour: Behaviour, method: str) -> Behaviour:
    async def guarded(request: Any, context: CallContext) -> Any:
        try:
            return await behaviour(request, context)
        except Exception as error:
            await _end(context, method, error)

    return guarded


def _guard_generator(behaviour: Behaviour, method: str) -> Behaviour:
    async def guarded(request: Any, context: CallContext) -> AsyncIterator[Any]:
        try:
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await _end(context, method, error)

    return guarded


async def _end(context: CallContext, method: str, error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error  # the handler chose its status itself
    if isinstance(error, grpc.aio.InternalError):
        raise asyncio.CancelledError from None  # its own write found that the caller has gone
    try:
        if isinstance(error, TasukiError):
            await abort(context, error)
        log.error("%s failed", method, exc_info=error)
        await abort(context, TasukiError(f"internal error ({type(error).__name__}); see the log"))
    except grpc.aio.InternalError:  # nobody can be told
        raise asyncio.CancelledError from None
