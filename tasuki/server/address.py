"""Host and port as one word, and why one could not be bound."""

from __future__ import annotations

import errno
import os
import socket

from tasuki.errors import ConfigError


def join_host_port(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def default_name(host: str, port: int) -> str:
    """`host:port`, with this machine's name for a host that means every address: all workers that
    listen so would have one name.
    """
    everywhere = host in ("", "0.0.0.0", "::")
    return join_host_port(socket.gethostname() if everywhere else host, port)


def require_port(flag: str, port: int) -> None:
    """Raise ConfigError unless `port` can be one; 0 stands for any free one."""
    if not 0 <= port < 65536:
        raise ConfigError(f"{flag} is {port}; expected 0 (any free port) to 65535")


def bind_error(what: str, host: str, port: int, error: OSError) -> ConfigError:
    """Why `what` cannot listen there, in words that say what to do."""
    address = join_host_port(host, port)
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"{what}: port {port} on {host} is in use by another process; "
            "name another port, or 0 for any free one"
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"{what}: port {port} is privileged; name one from 1024 on, or 0")
    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    return ConfigError(f"{what}: cannot listen on {address} ({reason}); check the host")


def probe(host: str, port: int) -> OSError | None:
    """Bind `host:port` for a moment, to learn why another library could not."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(1)
    except OSError as error:
        return error
    return None
