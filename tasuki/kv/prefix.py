"""Names for the contents of KV blocks: equal names, equal tokens from the first on.

Pure. The KV of a block depends on all tokens before it, so its name is a hash of the previous
block's name and its own tokens; the first one starts from a salt, and requests with different salts
share nothing. The hash is a cryptographic one: a caller who could make two prompts collide would
read another caller's cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

NAME_BYTES = 16


def root(salt: str) -> bytes:
    """The name before the first block."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=NAME_BYTES).digest()


def extend(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a block of `token_ids` that follows the block named `parent`."""
    # 8 bytes a token: ids are checked against a vocabulary elsewhere, and must not fail here
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=NAME_BYTES).digest()
