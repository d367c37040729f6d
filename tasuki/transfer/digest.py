"""Digests of KV segments: xxh3-64 over a view's bytes, in host memory without a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import xxhash

from tasuki.errors import TransferError

DigestName = Literal["xxh3", "none"]
Digest = Callable[[torch.Tensor], int]


def xxh3(view: torch.Tensor) -> int:
    """Unsigned 64-bit digest of a tensor (uint8, 1-D, contiguous). Called on any thread.

    Of a GPU's memory it takes a copy first, which is why digests are off there by default.
    """
    return xxhash.xxh3_64_intdigest(view.cpu().numpy().data)


def no_digest(view: torch.Tensor) -> int:
    return 0


def digest_named(name: str) -> Digest:
    """The digest that a handshake named. Raises TransferError for an unknown one."""
    if name == "xxh3":
        return xxh3
    if name == "none":
        return no_digest
    raise TransferError(f"the peer wants digest {name!r}; expected xxh3 or none", reason="refused")


def negotiate(ours: str, theirs: str) -> DigestName:
    """On if either side wants it. Raises TransferError for an unknown name."""
    wanted = {ours, theirs}
    for name in wanted:
        digest_named(name)
    return "xxh3" if "xxh3" in wanted else "none"
