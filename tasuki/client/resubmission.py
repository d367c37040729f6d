"""One request across the deaths of routers: what it has so far, and whether to send it again.

What a router had answered goes along, so that the next one goes on where it ended. Pure: takes
`now`, in seconds.
"""

from __future__ import annotations

import grpc

from tasuki.client.rpc_error import REASON_KEY
from tasuki.v1 import common_pb2, inference_pb2

ACCEPTED_KEY = "tasuki-accepted"  # in the initial metadata of a router that has the request
FIRST_PAUSE, LAST_PAUSE = 0.05, 1.0  # seconds between attempts
_BROKEN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)


class Resubmission:
    """`patience` is how many seconds may pass without an answer before the loss is the caller's."""

    def __init__(
        self, request: inference_pb2.GenerateRequest, num_targets: int, patience: float
    ) -> None:
        self._request = request
        self._num_targets = num_targets
        self._patience = patience
        self._outputs: dict[int, inference_pb2.SampleOutput] = {}
        self._accepted = False  # by some router: then it is ours to see it through
        self._failures = 0  # in a row
        self._lost_at: float | None = None

    def request(self) -> inference_pb2.GenerateRequest:
        """What to send now."""
        again = inference_pb2.GenerateRequest()
        again.CopyFrom(self._request)
        again.outputs.extend(self._outputs[index] for index in sorted(self._outputs))
        return again

    def accepted(self) -> None:
        self._accepted = True

    def note(self, response: inference_pb2.GenerateResponse) -> None:
        """An answer came; it is not asked for again."""
        self._accepted, self._failures, self._lost_at = True, 0, None
        index = response.sample_index
        output = self._outputs.setdefault(index, inference_pb2.SampleOutput(sample_index=index))
        output.token_ids.extend(response.token_ids)
        output.ended |= response.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED

    @property
    def is_complete(self) -> bool:
        """Every sample has its end: only facts about the whole can be missing."""
        wanted = max(self._request.sampling.n, 1)
        return sum(output.ended for output in self._outputs.values()) == wanted

    def pause(self, error: grpc.aio.AioRpcError, now: float) -> float | None:
        """Seconds until it should be sent again; None: the error is the caller's."""
        self._failures += 1
        if self._lost_at is None:
            self._lost_at = now
        untried = self._failures < self._num_targets
        if not is_loss(error) or not (self._accepted or untried):
            return None
        if now - self._lost_at >= self._patience:
            return None
        rounds = min((self._failures - 1) // self._num_targets, 10)
        return 0.0 if untried else min(FIRST_PAUSE * 2.0**rounds, LAST_PAUSE)


def was_accepted(metadata: grpc.aio.Metadata) -> bool:
    """Whether a router says, with the first it says, that it has the request."""
    return any(key == ACCEPTED_KEY for key, _ in metadata)


def is_loss(error: grpc.aio.AioRpcError) -> bool:
    """Whether a router went away, or is going, and not the request was refused."""
    reason = (error.trailing_metadata() or {}).get(REASON_KEY, "")
    return reason == "draining" or (not reason and error.code() in _BROKEN)
