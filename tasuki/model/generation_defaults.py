"""What a model's makers recommend for sampling: generation_config.json. Reads JSON only.

Temperature and the cuts count where the file says `do_sample`; without it the file means greedy.
"""

from __future__ import annotations

from pathlib import Path

from tasuki.errors import InvalidRequestError, ModelError
from tasuki.messages import SamplingParams
from tasuki.messages.sampling import require_valid
from tasuki.model.fields import Fields, read_json


def generation_defaults(directory: Path) -> SamplingParams:
    """Of its values only temperature, top_k, top_p, min_p and repetition_penalty mean anything.

    Raises ModelError for a value that no request could have.
    """
    file = directory / "generation_config.json"
    if not file.is_file():
        return SamplingParams()
    fields = Fields(file, read_json(file))
    penalty = fields.positive_number("repetition_penalty", 1.0)
    if fields.flag("do_sample", False):
        sampling = SamplingParams(
            temperature=fields.number("temperature", 1.0),
            top_k=fields.positive("top_k", 50) if fields.raw("top_k") else 0,
            top_p=fields.positive_number("top_p", 1.0),
            min_p=fields.number("min_p", 0.0),
            repetition_penalty=penalty,
        )
    else:
        sampling = SamplingParams(repetition_penalty=penalty)
    try:
        require_valid(sampling)
    except InvalidRequestError as error:
        raise ModelError(f"{file}: {error.message}") from None
    return sampling
