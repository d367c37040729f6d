"""The tensors of the KV cache: one allocation, block-major. Knows nothing about requests."""

from __future__ import annotations

import mmap

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
        if device == "cpu":
            self.tensor = huge_zeros(num_blocks * layout.block_bytes).view(dtype).view(shape)
        else:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self._bytes = self.tensor.view(torch.uint8).view(num_blocks, layout.block_bytes)

    @property
    def nbytes(self) -> int:
        return self._bytes.numel()

    def block_bytes_view(self, first_block_id: int, count: int) -> torch.Tensor:
        """The bytes of `count` adjacent blocks, uint8 [count * block_bytes], without a copy."""
        if first_block_id < 0 or count < 1 or first_block_id + count > self.num_blocks:
            raise IndexError(f"blocks {first_block_id}..+{count} of {self.num_blocks}")
        return self._bytes[first_block_id : first_block_id + count].view(-1)

    def copy_block(self, source: int, target: int) -> None:
        self._bytes[target].copy_(self._bytes[source])

    def zero_tail(self, block_id: int, first_position: int) -> None:
        """Zero the positions of one block from `first_position` on: a partial block travels
        clean.
        """
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
