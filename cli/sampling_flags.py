"""Flags of `tasuki generate` that hold several values in one text. Knows nothing about clusters."""

from __future__ import annotations

import json

from tasuki.errors import ConfigError


def parse_token_ids(flag: str, text: str) -> tuple[int, ...]:
    """Turn `1,2,3` into (1, 2, 3). Raises ConfigError naming what is no token id."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    for part in parts:
        if not part.isdecimal() or int(part) >= 1 << 32:
            raise ConfigError(f"{flag} holds {part!r}; expected whole numbers such as 1,2,3")
    return tuple(int(part) for part in parts)


def parse_logit_bias(text: str) -> dict[int, float]:
    """Turn `5:1.5,7:-100` into {5: 1.5, 7: -100.0}. Raises ConfigError naming what is no pair."""
    biases: dict[int, float] = {}
    for part in text.split(",") if text.strip() else []:
        token_id, _, bias = part.partition(":")
        try:
            (number,) = parse_token_ids("--logit-bias", token_id)
            biases[number] = float(bias)
        except (ConfigError, ValueError):
            raise ConfigError(
                f"--logit-bias holds {part!r}; expected pairs of token id and bias such as "
                "5:1.5,7:-100"
            ) from None
    return biases


def parse_stop(text: str) -> list[str]:
    """One text as it is, or several as a JSON list of strings. Raises ConfigError for another."""
    if not text.startswith("["):
        return [text] if text else []
    try:
        stops = json.loads(text)
    except ValueError:
        return [text]  # a text that happens to begin like a list
    if not all(isinstance(stop, str) for stop in stops):
        raise ConfigError(f'--stop is {text!r}; expected one text, or a list such as ["a", "b"]')
    return [str(stop) for stop in stops]
