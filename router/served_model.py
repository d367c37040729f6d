"""What a router knows of its model: name, sizes, tokenizer, chat template. No weights."""

from __future__ import annotations

from dataclasses import dataclass

from tasuki.convert.resolve import resolve_model
from tasuki.errors import ConfigError
from tasuki.messages import SamplingParams
from tasuki.model.config import ModelConfig
from tasuki.model.generation_defaults import generation_defaults
from tasuki.text.chat_template import ChatTemplate
from tasuki.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """`max_model_len` is the model's own; the workers' KV caches may hold less."""

    model_id: str
    vocab_size: int
    max_model_len: int
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    sampling: SamplingParams  # of requests that leave it to us

    @classmethod
    def from_directory(cls, directory: str, *, recommended: bool = True) -> ServedModel:
        """Read what a router needs of a model directory, or of what stands for one. With
        `recommended`, its generation_config.json decides about sampling where requests do not.

        Raises ConfigError if unset, ModelError for no model.
        """
        if not directory:
            raise ConfigError(
                "--model is empty; a router needs the model directory for its tokenizer"
            )
        path = resolve_model(directory, weights=False)
        config = ModelConfig.from_directory(path)
        return cls(
            model_id=config.model_id,
            vocab_size=config.vocab_size,
            max_model_len=config.max_position,
            tokenizer=Tokenizer.from_directory(path),
            chat_template=ChatTemplate.from_directory(path),
            sampling=generation_defaults(path) if recommended else SamplingParams(),
        )
