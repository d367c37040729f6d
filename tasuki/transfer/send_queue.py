"""Offered blocks of many handoffs, and which go next: fair by bytes, in big contiguous runs.

Pure: knows block ids and sizes; announces nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from tasuki.transfer.block_run import is_run, run_length

DIRECT_BYTES = 256 << 10  # a shorter contiguous run is worth copying into one larger message


@dataclass(frozen=True)
class OfferedRun:
    """Logically consecutive blocks that make one segment."""

    handoff_id: str
    first_block: int  # logical
    block_ids: tuple[int, ...]  # physical

    @property
    def is_contiguous(self) -> bool:
        return is_run(self.block_ids)


@dataclass(eq=False)
class OfferLane:
    """What one handoff offers and has not announced. `served` orders the lanes."""

    next_block: int
    served: int
    block_ids: dict[int, int] = field(default_factory=dict)  # logical -> physical, in order


class SendQueue:
    """Serves the handoff that got the fewest bytes; one that joins starts level with the others."""

    def __init__(self, block_bytes: int, max_segment_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._max_blocks = max_segment_bytes // block_bytes
        assert self._max_blocks >= 1
        self._lanes: dict[str, OfferLane] = {}

    def add(self, handoff_id: str, first_block: int, block_ids: Sequence[int]) -> None:
        """Append blocks; `first_block` follows what this handoff offered before."""
        lane = self._lanes.get(handoff_id)
        if lane is None:
            lane = OfferLane(first_block, self._floor())
            self._lanes[handoff_id] = lane
        if not lane.block_ids:  # it was idle: no credit for that
            lane.served = max(lane.served, self._floor())
            lane.next_block = first_block
        offset = lane.next_block + len(lane.block_ids)
        assert first_block == offset, "offers are consecutive"
        lane.block_ids.update(enumerate(block_ids, first_block))

    def next_run(self) -> OfferedRun | None:
        """The next segment's blocks; None when nothing is offered. Changes nothing."""
        waiting = [(lane.served, key) for key, lane in self._lanes.items() if lane.block_ids]
        if not waiting:
            return None
        key = min(waiting, key=lambda entry: entry[0])[1]
        lane = self._lanes[key]
        ids = tuple(islice(lane.block_ids.values(), self._max_blocks))
        length = run_length(ids)
        if length * self._block_bytes >= DIRECT_BYTES:
            ids = ids[:length]
        return OfferedRun(key, lane.next_block, ids)

    def take(self, run: OfferedRun) -> None:
        """`run`, which `next_run` just gave, is announced."""
        lane = self._lanes[run.handoff_id]
        for block in range(run.first_block, run.first_block + len(run.block_ids)):
            del lane.block_ids[block]
        lane.next_block += len(run.block_ids)
        lane.served += len(run.block_ids) * self._block_bytes

    def drop(self, handoff_id: str) -> None:
        """Forget a handoff, with whatever it offered. Unknown ids are ignored."""
        self._lanes.pop(handoff_id, None)

    def pending(self, handoff_id: str) -> int:
        """Blocks offered and not announced."""
        lane = self._lanes.get(handoff_id)
        return 0 if lane is None else len(lane.block_ids)

    def _floor(self) -> int:
        busy = (lane.served for lane in self._lanes.values() if lane.block_ids)
        return min(busy, default=0)
