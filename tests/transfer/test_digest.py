from __future__ import annotations

import pytest
import torch
import xxhash

from tasuki.errors import TransferError
from tasuki.transfer.digest import digest_named, negotiate


def test_xxh3_is_of_the_bytes_of_a_view() -> None:
    memory = torch.arange(256, dtype=torch.uint8)
    digest = digest_named("xxh3")
    assert digest(memory[16:80]) == xxhash.xxh3_64_intdigest(bytes(range(16, 80)))
    memory[40] ^= 1
    assert digest(memory[16:80]) != xxhash.xxh3_64_intdigest(bytes(range(16, 80)))


def test_none_is_zero() -> None:
    assert digest_named("none")(torch.ones(8, dtype=torch.uint8)) == 0


def test_negotiation_is_on_if_either_wants_it() -> None:
    assert negotiate("none", "none") == "none"
    assert negotiate("none", "xxh3") == "xxh3"
    assert negotiate("xxh3", "none") == "xxh3"
    with pytest.raises(TransferError, match="md5"):
        negotiate("xxh3", "md5")
