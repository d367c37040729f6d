"""The Inference service: the door for clients. Reads a call, hands it on, describes the model.

Knows nothing about workers' streams; errors leave as they are and become statuses elsewhere.
"""

from __future__ import annotations

from typing import Any

import grpc

from router.config import RouterConfig
from router.generation import Generation, read_generation
from router.request_stream import RequestStream, RouterParts
from router.served_model import ServedModel
from router.workers.registry import Registry
from tasuki.errors import UnavailableError
from tasuki.reasons import RejectionReason
from tasuki.v1 import inference_pb2, inference_pb2_grpc

ACCEPTED_KEY = "tasuki-accepted"
Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """After `drain` every new request is refused; those that run go on."""

    def __init__(
        self, config: RouterConfig, model: ServedModel, registry: Registry, parts: RouterParts
    ) -> None:
        self._config = config
        self._model = model
        self._registry = registry
        self._parts = parts
        self._draining = False

    @property
    def draining(self) -> bool:
        return self._draining

    def drain(self) -> None:
        self._draining = True

    # The stubs know only the generator form. This one writes itself, so that a cancel is raised
    # where the write stands, and the Decode stream behind it ends at once.
    async def Generate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        deadline = self._parts.clock() + self._timeout(context)
        if not self._draining:
            # before anything else, so that its client knows that a router, now dead, had it
            await context.send_initial_metadata(((ACCEPTED_KEY, "1"),))
        stream = RequestStream(context, self._parts, deadline)
        await stream.run(self._read(request))

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Context
    ) -> inference_pb2.GetModelInfoResponse:
        return inference_pb2.GetModelInfoResponse(
            model=self._model.model_id,
            max_model_len=self.capacity,
            vocab_size=self._model.vocab_size,
            has_chat_template=self._model.chat_template is not None,
            setup=self._config.setup,
        )

    @property
    def capacity(self) -> int:
        """Most tokens of prompt and output that one request can have here."""
        held = self._registry.capacity()
        return self._model.max_model_len if held is None else min(held, self._model.max_model_len)

    async def _read(self, request: inference_pb2.GenerateRequest) -> Generation:
        if self._draining:
            raise UnavailableError(
                "this router is going away; send the request to another one",
                reason=RejectionReason.DRAINING,
            )
        if request.outputs:  # the router before knew what fits, and clipped an unset max_tokens
            await self._registry.wait_capacity(self._config.queue_timeout)
        return await read_generation(
            request,
            self._model,
            capacity=self.capacity,
            default_max_tokens=self._config.default_max_tokens,
            default_slo=self._config.slo,
            default_sampling=self._model.sampling,
        )

    def _timeout(self, context: Context) -> float:
        """Seconds the request gets: its caller's deadline or the default, at most the maximum."""
        asked = context.time_remaining()
        wanted = self._config.request_timeout if asked is None else asked
        return min(wanted, self._config.max_request_timeout)
