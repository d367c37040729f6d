"""How a GGUF file says that rotary positions are scaled, as config.json says it.

Knows nothing about tensors' places or tokenizers. A scaling that cannot be said exactly is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tasuki.errors import ModelError

Array = np.ndarray[Any, np.dtype[np.float32]]
LINEAR: dict[str, Any] = {"rope_type": "linear"}
# Llama 3.1 and its successors; the file holds what they make of each frequency, not the numbers.
LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR, ORIGINAL_MAX_POSITION = 1.0, 4.0, 8192


def rope_parameters(
    path: object, own: Callable[[str], Any], head_dim: int, divisors: Array | None
) -> dict[str, Any]:
    """`rope_parameters` of config.json. `own` looks a key of the model's kind up (None: absent);
    `divisors` is the tensor by which each pair's frequency is divided, float32 [head_dim / 2].

    Raises ModelError for a scaling that is not supported.
    """
    theta = _number(path, own, "rope.freq_base") or 10000.0
    kind = own("rope.scaling.type") or "linear"  # where only a factor is given, it is this one
    if kind not in ("none", "linear"):
        raise ModelError(
            f"{path} has rope.scaling.type {str(kind)[:60]}, which is not supported; "
            "expected none or linear"
        )
    stretch = _number(path, own, "rope.scaling.factor") or _number(path, own, "rope.scale_linear")
    factor = stretch or 1.0 if kind == "linear" else 1.0
    if divisors is None:
        own_kind = {"rope_type": "default"} if factor == 1.0 else LINEAR | {"factor": factor}
        return {"rope_theta": theta} | own_kind
    if factor != 1.0:
        raise ModelError(f"{path} scales rotary positions twice, which is not supported")
    return {"rope_theta": theta} | _llama3(path, divisors, theta, head_dim)


def _number(path: object, own: Callable[[str], Any], key: str) -> float | None:
    value = own(key)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ModelError(f"{path} has {key} = {str(value)[:60]}; expected a number, not negative")
    return float(value)


def _llama3(path: object, divisors: Array, theta: float, head_dim: int) -> dict[str, Any]:
    factor = round(float(divisors.max()), 3)
    expected = llama3_divisors(factor, theta, head_dim)
    if expected.shape != divisors.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise ModelError(
            f"{path} has rope_freqs that are not those of Llama 3, which is not supported; "
            "use the model's Hugging Face directory instead"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW_FREQ_FACTOR,
        "high_freq_factor": HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": ORIGINAL_MAX_POSITION,
    }


def llama3_divisors(factor: float, theta: float, head_dim: int) -> Array:
    """What `llama3` scaling divides each pair's frequency by, float32 [head_dim / 2]."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = ORIGINAL_MAX_POSITION * frequencies / (2 * math.pi)
    share = (turns - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR)
    kept = np.clip(share, 0.0, 1.0)
    divisors: Array = (1 / (kept + (1 - kept) / factor)).astype(np.float32)
    return divisors
