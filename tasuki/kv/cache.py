"""The tensors of the KV cache: one allocation, block-major. Knows nothing about requests."""

from __future__ import annotations

import torch

from tasuki.kv.layout import KVLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KVCache:
    """`tensor` is [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous.

    A run of adjacent blocks is one contiguous run of bytes, so it can be sent and received in
    place.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: str = "cpu") -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.tensor = torch.zeros(
            (
                num_blocks,
                layout.num_layers,
                2,
                layout.num_kv_heads,
                layout.block_size,
                layout.head_dim,
            ),
            dtype=DTYPES[layout.dtype],
            device=device,
        )
        self._bytes = self.tensor.view(torch.uint8).view(num_blocks, layout.block_bytes)

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
        self.tensor[block_id, :, :, :, first_position:, :] = 0
