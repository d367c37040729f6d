"""The tensors of the KV cache: one allocation, block-major. Knows nothing about requests.

On a GPU the small copies of transfers run on a stream of their own, beside the step that is being
computed, and have ended when a method returns. That needs no order between the streams: a block is
copied only when the step that wrote it has been waited for, and no step has it before.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from tasuki.kv.layout import KVLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HUGE_PAGE = 2 << 20


class KVCache:
    """`tensor` is [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous; with
    transposed keys the last two dimensions of K (index 0 of the third) change places in memory.

    A run of adjacent blocks is one contiguous run of bytes, so it can be sent and received in
    place. On a CPU the memory asks for huge pages: a step touches all of it.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: str = "cpu") -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (
            num_blocks,
            layout.num_layers,
            2,
            layout.num_kv_heads,
            layout.block_size,
            layout.head_dim,
        )
        dtype = DTYPES[layout.dtype]
        self._aside: torch.cuda.Stream | None = None
        if device == "cpu":
            self.tensor = huge_zeros(num_blocks * layout.block_bytes).view(dtype).view(shape)
        else:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
            # torch does not annotate `Stream`
            self._aside = torch.cuda.Stream(self.tensor.device)  # type: ignore[no-untyped-call]
            torch.cuda.current_stream(self.tensor.device).synchronize()  # zero before any copy
        self._bytes = self.tensor.view(torch.uint8).view(num_blocks, layout.block_bytes)

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def nbytes(self) -> int:
        return self._bytes.numel()

    def block_bytes_view(self, first_block_id: int, count: int) -> torch.Tensor:
        """The bytes of `count` adjacent blocks, uint8 [count * block_bytes], without a copy."""
        if first_block_id < 0 or count < 1 or first_block_id + count > self.num_blocks:
            raise IndexError(f"blocks {first_block_id}..+{count} of {self.num_blocks}")
        return self._bytes[first_block_id : first_block_id + count].view(-1)

    def clear(self) -> None:
        """Zero all of it, for good when this returns."""
        with self._beside_the_step():
            self.tensor.zero_()

    def copy_block(self, source: int, target: int) -> None:
        """Part of a step: on a GPU, in order with its other work."""
        self._bytes[target].copy_(self._bytes[source])

    def read_blocks(self, block_ids: Sequence[int], into: torch.Tensor) -> None:
        """Copy whole blocks to uint8 [len(block_ids) * block_bytes], on any device or pinned."""
        with self._beside_the_step():
            for block_id, target in zip(block_ids, self._by_block(into), strict=True):
                target.copy_(self._bytes[block_id], non_blocking=True)

    def write_blocks(self, block_ids: Sequence[int], source: torch.Tensor) -> None:
        """Copy whole blocks from uint8 [len(block_ids) * block_bytes], on any device or pinned."""
        with self._beside_the_step():
            for block_id, found in zip(block_ids, self._by_block(source), strict=True):
                self._bytes[block_id].copy_(found, non_blocking=True)

    def _by_block(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.view(-1, self.layout.block_bytes)

    @contextmanager
    def _beside_the_step(self) -> Iterator[None]:
        if self._aside is None:
            yield
            return
        with torch.cuda.stream(self._aside):
            yield
        self._aside.synchronize()  # a few copies are on it, never a step

    def zero_tail(self, block_id: int, first_position: int) -> None:
        """Zero the positions of one block from `first_position` on: a partial block travels
        clean.
        """
        with self._beside_the_step():
            keys, values = self.tensor[block_id].unbind(1)  # [layers, kv heads, ...]
            if self.layout.keys_transposed:
                keys = keys.view(*keys.shape[:2], self.layout.head_dim, self.layout.block_size)
                keys[..., first_position:] = 0
            else:
                keys[:, :, first_position:] = 0
            values[:, :, first_position:] = 0


def huge_zeros(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] of zeros at a huge page's boundary, in huge pages where the system has them.

    Nothing is touched here: memory is taken when it is first written.
    """
    # private: shared memory gets no huge pages
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps `memory`
    first = -whole.data_ptr() % HUGE_PAGE
    return whole[first : first + nbytes]
