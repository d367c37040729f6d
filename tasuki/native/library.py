"""Loads the compiled kernels into this process and tries them. Knows nothing about models."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import torch

from tasuki.native.build import NativeBuildError, ensure_library

log = logging.getLogger(__name__)


@functools.cache
def load(cache: Path) -> bool:
    """Compile if needed, and load. False, after one line of warning, when that cannot be had."""
    try:
        # torch does not annotate `load_library`
        torch.ops.load_library(str(ensure_library(cache)))  # type: ignore[no-untyped-call]
        _try_them()
    except (NativeBuildError, OSError, RuntimeError) as error:
        log.warning("computing without compiled kernels, at half the speed: %s", error)
        return False
    return True


def _try_them() -> None:
    """Raise RuntimeError when a kernel says something else than torch on a small example."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 40, generator=generator)
    weight = torch.rand(40, generator=generator)
    normal = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
    gated = torch.nn.functional.silu(x[:, :20]) * x[:, 20:]
    for found, expected in (
        (torch.ops.tasuki.rms_norm(x, weight, 1e-5), normal),
        (torch.ops.tasuki.silu_product(x), gated),
    ):
        if not torch.allclose(found, expected, rtol=1e-5, atol=1e-6):
            raise RuntimeError("a compiled kernel computes something else than torch does")
