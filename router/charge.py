"""The router's claim of one placed request on its workers, moved along by what they answer.

Blocks, the request and (local) prompt tokens are charged to the decode worker, prompt tokens
(split) to the prefill worker that computes them. Each charge is returned once, whatever happens.
"""

from __future__ import annotations

from router.placement import Placement, PlacementRequest
from router.workers.registry import Registry
from router.workers.watched_worker import WatchedWorker


class Charge:
    """`key` must be unique among all charges of one registry."""

    def __init__(
        self, key: int, registry: Registry, placement: Placement, request: PlacementRequest
    ) -> None:
        self._key = key
        self._registry = registry
        self._prompt_len = prompt_len = request.prompt_len
        self.decode = registry.worker(placement.decode.address)
        self._computing: WatchedWorker | None = None
        self.decode.ledgers.blocks.charge(key, placement.decode.blocks_for(prompt_len + 1))
        self.decode.ledgers.requests.charge(key, request.n)
        self.decode.outstanding.add(key)
        if placement.candidates:
            self._compute_on(registry.prefill_worker(placement.candidates[0].worker_id))
        else:
            self._compute_on(self.decode)

    def dispatched(self, prefill_worker_id: str) -> None:
        """The blocks are reserved, and this prefill worker computes the prompt."""
        self.decode.ledgers.blocks.acknowledge(self._key)
        self.decode.ledgers.requests.acknowledge(self._key)
        self._compute_on(self._registry.prefill_worker(prefill_worker_id))
        self._acknowledge_tokens()

    def local(self) -> None:
        """The decode worker queued the prompt; its blocks are taken as it is computed."""
        self.decode.ledgers.requests.acknowledge(self._key)
        self._compute_on(self.decode)
        self._acknowledge_tokens()

    def first_token(self) -> None:
        """The prompt is computed."""
        self._compute_on(None)
        self.decode.ledgers.blocks.acknowledge(self._key)

    def release(self) -> None:
        """The request is no longer there, for whatever reason. Idempotent."""
        self._compute_on(None)
        self.decode.ledgers.discharge(self._key)
        self.decode.outstanding.discard(self._key)

    def _compute_on(self, worker: WatchedWorker | None) -> None:
        """Move the prompt's tokens to `worker`; None: they wait nowhere any more."""
        if worker is self._computing:
            return
        if self._computing is not None:
            self._computing.ledgers.tokens.discharge(self._key)
        if worker is not None:
            worker.ledgers.tokens.charge(self._key, self._prompt_len)
        self._computing = worker

    def _acknowledge_tokens(self) -> None:
        if self._computing is not None:
            self._computing.ledgers.tokens.acknowledge(self._key)
