"""Whether a port can be listened on, asked before minutes of work depend on it."""

from __future__ import annotations

import socket

from tasuki.errors import ConfigError


def check_port_free(host: str, port: int) -> None:
    """Raise ConfigError when `port` is taken; 0 is always fine. Lets go of it at once."""
    if port == 0:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # A port that only waits out old connections can be taken, and gRPC does take it.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            # A second bind may succeed beside one that has not listened yet; a second listen never.
            probe.listen(1)
        except OSError as error:
            raise ConfigError(
                f"--port is {port}, and {host}:{port} cannot be used: {error.strerror}; "
                "stop what listens there, or give another port (0 takes a free one)"
            ) from None
