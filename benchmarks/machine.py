"""What this machine is and what it can do at best: the limits that every figure stands beside."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tasuki.cache_root import cache_root
from tasuki.model.linear import PLAIN, Linear, probe
from tasuki.native import library

MIB = 1 << 20
CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")


@dataclass(frozen=True)
class Limits:
    """With the threads that are set. Bytes, or operations in a dtype, per second."""

    memory_read: float
    plain_gemm: float  # torch's own, which is what transformers computes with
    prepacked_gemm: float  # of packed weights, oneDNN's or ours; the plain one where both lack

    @property
    def gemm(self) -> float:
        return max(self.plain_gemm, self.prepacked_gemm)

    @classmethod
    def measure(cls, dtype: torch.dtype = torch.float32) -> Limits:
        native = library.load(cache_root(os.environ))
        kinds = {probe(dtype), probe(dtype, native=native)}
        packed = max(gemm_speed(kind, dtype) for kind in kinds)
        return cls(read_speed(), gemm_speed(PLAIN, dtype), packed)


def describe() -> str:
    """Processor, cores, torch version, in one line."""
    system = f"Linux {platform.release()}, torch {torch.__version__}"
    return f"{processor()}, {os.cpu_count()} cores, {system}"


def processor() -> str:
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    model = f"family {facts.get('cpu family', '?')} model {facts.get('model', '?')}"
    return f"{facts.get('model name', 'unknown')} ({model})"


def congestion_control() -> str:
    """How this machine's TCP decides when to send: gloo and the raw connection both use it."""
    return CONGESTION_CONTROL.read_text().strip() if CONGESTION_CONTROL.exists() else "unknown"


def memcpy_speed(nbytes: int = 256 * MIB) -> float:
    """Bytes per second of copying memory, one thread; counts the bytes copied once."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    return nbytes / _best(lambda: target.copy_(source))


def read_speed(nbytes: int = 512 * MIB) -> float:
    """Bytes per second of reading memory."""
    values = torch.ones(nbytes // 4)
    return nbytes / _best(lambda: values.sum())


def gemm_speed(kind: str, dtype: torch.dtype = torch.float32, size: int = 1024) -> float:
    """Operations per second of a matrix product with fixed weights."""
    rows = torch.ones(size, size).to(dtype)
    linear = Linear(torch.ones(size, size), kind=kind, dtype=dtype, rows_hint=size)
    return 2 * size**3 / _best(lambda: linear(rows))


def _best(work: Callable[[], object], times: int = 7) -> float:
    best = float("inf")
    for _ in range(times):
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best
