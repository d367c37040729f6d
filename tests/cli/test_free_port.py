"""A port in use is one clear line before anything starts."""

from __future__ import annotations

import socket

import pytest

from cli.cluster.free_port import check_port_free
from tasuki.errors import ConfigError


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port is {port}.*give another port"):
            check_port_free("127.0.0.1", port)
    check_port_free("127.0.0.1", port)


def test_zero_is_always_free() -> None:
    check_port_free("127.0.0.1", 0)
