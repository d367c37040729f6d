"""The shape contract of KV: what one block holds, and whether two workers mean the same by it.

Pure arithmetic; no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasuki.errors import LayoutMismatchError
from tasuki.messages import LayoutDescription

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
# [block, layer, K|V, kv head, position, head_dim], row-major; in the second version K is
# [.., head_dim, position]
PLAIN_VERSION, TRANSPOSED_VERSION = "block-major-1", "block-major-2"


@dataclass(frozen=True)
class KVLayout:
    """A block is one contiguous run of bytes: all layers, K and V, `block_size` positions.

    Which order K has within a block is the choice of what computes attention.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str = "float32"
    keys_transposed: bool = False

    @property
    def version(self) -> str:
        return TRANSPOSED_VERSION if self.keys_transposed else PLAIN_VERSION

    @property
    def block_bytes(self) -> int:
        elements = self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def describe(self, *, model_id: str, weights_digest: str, numerics: str) -> LayoutDescription:
        """What a link's handshake compares."""
        return LayoutDescription(
            model_id=model_id,
            weights_digest=weights_digest,
            dtype=self.dtype,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            layout_version=self.version,
            numerics=numerics,
        )


FINGERPRINT = (
    "layout_version",
    "model_id",
    "weights_digest",
    "dtype",
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "block_size",
)


def require_same_layout(ours: LayoutDescription, theirs: LayoutDescription) -> None:
    """Raise LayoutMismatchError naming the first field of the fingerprint that differs."""
    for name in FINGERPRINT:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            raise LayoutMismatchError(
                f"KV layouts differ in {name}: this worker has {mine!r}, the other has {other!r}; "
                "start both workers with the same model directory, dtype and block size, and both "
                "with or both without --no-native"
            )
