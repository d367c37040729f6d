"""Whether physical blocks lie side by side, so that they are one contiguous run of bytes."""

from __future__ import annotations

from collections.abc import Sequence


def run_length(block_ids: Sequence[int]) -> int:
    """How many ids from the first on ascend by one."""
    length = 1
    while length < len(block_ids) and block_ids[length] == block_ids[0] + length:
        length += 1
    return length


def is_run(block_ids: Sequence[int]) -> bool:
    return run_length(block_ids) == len(block_ids)
