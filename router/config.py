"""The settings of a router process, and the arithmetic that makes them usable. Opens nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tasuki.config import setting
from tasuki.errors import ConfigError
from tasuki.slo import Slo


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Every flag of `python -m router`. Times in seconds unless the name says otherwise."""

    model: str = setting(
        "", "Model directory, .gguf file, or owner/name on a hub: its tokenizer.", metavar="MODEL"
    )
    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(0, "gRPC port; 0 takes a free one.")
    metrics_port: int = setting(0, "Port of /metrics, /healthz and /readyz; 0 takes a free one.")
    prefill_workers: str = setting(
        "", "Prefill workers as host:port,host:port. Empty: colocated.", metavar="LIST"
    )
    decode_workers: str = setting("", "Decode workers as host:port,host:port.", metavar="LIST")
    max_queue: int = setting(256, "Most requests that wait for a placement.")
    queue_timeout: float = setting(30.0, "Seconds a request may wait for a placement.")
    request_timeout: float = setting(
        600.0, "Seconds a request gets when its caller names no deadline."
    )
    max_request_timeout: float = setting(
        3600.0, "Most seconds a request gets, whatever its deadline."
    )
    generation_config: str = setting(
        "auto",
        "Sampling of requests that name none: as the model's generation_config.json recommends "
        "(auto), or greedy (none).",
        choices=("auto", "none"),
    )
    default_max_tokens: int = setting(128, "Output tokens when a request names no max_tokens.")
    max_migrations: int = setting(
        3, "Decode workers in a row that a request may lose before any of them gives a token."
    )
    split_min_tokens: int = setting(64, "Shorter prompts are computed on the decode worker.")
    max_candidates: int = setting(3, "Most prefill workers named for one request.")
    slo_ttft_ms: float = setting(2000.0, "Objective for the time to the first token, milliseconds.")
    slo_tpot_ms: float = setting(100.0, "Objective for the time per output token, milliseconds.")
    connect_timeout: float = setting(5.0, "Seconds a worker gets to answer a new Watch stream.")
    report_timeout: float = setting(
        5.0, "Seconds without a load report before a worker is not used."
    )
    drain_timeout: float = setting(30.0, "Seconds that running requests get after SIGTERM.")
    lifeline_fd: int = setting(-1, "Exit when this inherited pipe closes; -1: none.")
    ready_fd: int = setting(-1, "Write one line of JSON to this descriptor when ready; -1: stdout.")

    def __post_init__(self) -> None:
        if not self.decode_addresses:
            raise ConfigError(
                "--decode-workers is empty; a router needs at least one decode worker, "
                "such as --decode-workers 127.0.0.1:50061"
            )
        twice = set(self.prefill_addresses) & set(self.decode_addresses)
        if twice:
            raise ConfigError(
                f"{', '.join(sorted(twice))} stands in --prefill-workers and in --decode-workers; "
                "one process has one role"
            )
        for name in ("max_queue", "default_max_tokens", "max_candidates"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require("max_migrations", self.max_migrations >= 0, "0 or more")
        self._require("split_min_tokens", self.split_min_tokens >= 0, "0 or more")
        for name in _POSITIVE:
            value = getattr(self, name)
            self._require(name, math.isfinite(value) and value > 0, "a number above 0")

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is {getattr(self, name)}; expected {expected}")

    @property
    def prefill_addresses(self) -> tuple[str, ...]:
        return _addresses("--prefill-workers", self.prefill_workers)

    @property
    def decode_addresses(self) -> tuple[str, ...]:
        return _addresses("--decode-workers", self.decode_workers)

    @property
    def setup(self) -> str:
        """How this cluster is laid out: "split" when it has prefill workers, else "colocated"."""
        return "split" if self.prefill_addresses else "colocated"

    @property
    def slo(self) -> Slo:
        return Slo(ttft=self.slo_ttft_ms / 1000, tpot=self.slo_tpot_ms / 1000)


_POSITIVE = (
    "queue_timeout",
    "request_timeout",
    "max_request_timeout",
    "slo_ttft_ms",
    "slo_tpot_ms",
    "connect_timeout",
    "report_timeout",
    "drain_timeout",
)


def _addresses(flag: str, text: str) -> tuple[str, ...]:
    """Split a comma list of host:port, in order. Raises ConfigError naming the entry."""
    found: list[str] = []
    for entry in (part.strip() for part in text.split(",")):
        if not entry:
            continue
        host, colon, port = entry.rpartition(":")
        if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
            raise ConfigError(
                f"{flag} holds {entry!r}; expected host:port, such as 127.0.0.1:50061"
            )
        if entry in found:
            raise ConfigError(f"{flag} names {entry} twice")
        found.append(entry)
    return tuple(found)
