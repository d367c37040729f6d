"""The text of one answer, from its tokens: certain characters only, and none past a stop.

Knows nothing about messages. Without stop strings, tokens that came together are turned into text
together.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.generation import Generation
from tasuki.text.detokenizer import IncrementalDetokenizer
from tasuki.text.stop_strings import StopStrings
from tasuki.text.tokenizer import Tokenizer


class AnswerText:
    """`num_tokens` counts those that belong to the answer: up to the one that completed a stop."""

    def __init__(self, tokenizer: Tokenizer, generation: Generation) -> None:
        self.num_tokens = 0
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = StopStrings(generation.stop, include=generation.include_stop)
        self._has_stops = bool(generation.stop)
        self._min_tokens = generation.sampling.min_tokens
        hidden = [] if generation.include_stop else generation.sampling.stop_token_ids
        self._hidden = frozenset(hidden)  # tokens that are no text where they end the answer

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.matched

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these tokens, the last of which may be left out."""
        if not self._has_stops and not self._hidden:
            self.num_tokens += len(token_ids)
            return self._detokenizer.push(token_ids)
        pieces: list[str] = []
        for token_id in token_ids:
            if self.stop is not None:
                break
            pieces.append(self._push_one(token_id))
        return "".join(pieces)

    def _push_one(self, token_id: int) -> str:
        self.num_tokens += 1
        armed = self.num_tokens > self._min_tokens
        if armed and token_id in self._hidden:
            return ""
        return self._stops.push(self._detokenizer.push([token_id]), armed=armed)

    def finish(self) -> str:
        """What was held back; it may still complete a stop. Nothing may be pushed afterwards."""
        armed = self.num_tokens > self._min_tokens
        text = self._stops.push(self._detokenizer.finish(), armed=armed)
        return text + self._stops.finish()
