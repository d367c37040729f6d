"""How a model's rotary frequencies are scaled for long contexts. Reads JSON fields; no torch.

Knows both generations of config.json: `rope_parameters`, and `rope_scaling` beside a top-level
`rope_theta`. A kind that is not implemented is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasuki.errors import ModelError
from tasuki.model.fields import Fields

KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """`default`: theta ** (-2 i / head_dim). `linear`: the same divided by `factor`. `llama3`: long
    waves divided by `factor`, short ones kept, and those between blended.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    @classmethod
    def from_fields(cls, fields: Fields) -> Rope:
        """Raises ModelError naming what is unsupported or wrong."""
        own_theta = fields.positive_number("rope_theta", cls.theta)
        for name in ("rope_parameters", "rope_scaling"):
            section = fields.section(name)
            if section.is_empty:
                continue
            if section.holds_sections:
                raise ModelError(
                    f"{fields.file} has {name} of several kinds, one for each kind of layer, which "
                    "is not supported"
                )
            kind = section.raw("rope_type") or section.raw("type") or "default"
            if kind not in KINDS:
                raise ModelError(
                    f"{fields.file} has {name} of type {repr(kind)[:60]}, which is not supported; "
                    f"expected one of {', '.join(KINDS)}"
                )
            if section.raw("partial_rotary_factor") not in (None, 1, 1.0):
                raise ModelError(
                    f"{fields.file} has {name}.partial_rotary_factor, which is not supported; "
                    "all dimensions of a head must rotate"
                )
            return cls._scaled(section, str(kind), own_theta)
        return cls(theta=own_theta)

    @classmethod
    def _scaled(cls, section: Fields, kind: str, own_theta: float) -> Rope:
        theta = section.positive_number("rope_theta", own_theta)
        if kind == "default":
            return cls(theta=theta)
        factor = section.required_number("factor")
        if kind == "linear":
            return cls(theta=theta, kind=kind, factor=factor)
        rope = cls(
            theta=theta,
            kind=kind,
            factor=factor,
            low_freq_factor=section.required_number("low_freq_factor"),
            high_freq_factor=section.required_number("high_freq_factor"),
            original_max_position=section.positive("original_max_position_embeddings"),
        )
        if rope.low_freq_factor >= rope.high_freq_factor:
            raise ModelError(
                f"{section.file} has rope factors {rope.low_freq_factor} and "
                f"{rope.high_freq_factor}; expected low_freq_factor below high_freq_factor"
            )
        return rope
