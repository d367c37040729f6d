"""The event line of one request at its router: every latency is a difference of two of its events.

Takes `now` and returns numbers; all times are seconds on the router's one monotonic clock. What
happened on workers comes as durations, never as times: clocks of two processes are not compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tasuki.messages import FirstTokenParts

EPSILON = 1e-6  # seconds; a residual above -EPSILON is rounding, one below is a bug


@dataclass(frozen=True)
class TtftParts:
    """Where the time to the first token went, in seconds. `hop` is the residual of the others."""

    queue: float  # arrived -> placed: validation, tokenization, the admission queue
    reservation: float
    prefill_queue: float
    prefill_compute: float
    fallback: float
    hop: float  # everything between the processes

    @property
    def ttft(self) -> float:
        """The total, which the parts add up to because hop is defined by it."""
        return self.hop + self.attributed

    @property
    def attributed(self) -> float:
        """All parts but hop."""
        return (
            self.queue
            + self.reservation
            + self.prefill_queue
            + self.prefill_compute
            + self.fallback
        )

    @property
    def residual_is_negative(self) -> bool:
        """True when the workers claim more time than passed: a bug, to be counted as one."""
        return self.hop < -EPSILON

    def as_dict(self) -> dict[str, float]:
        """The parts by their metric names, in the order in which they happen."""
        return {
            "queue": self.queue,
            "reservation": self.reservation,
            "prefill_queue": self.prefill_queue,
            "prefill_compute": self.prefill_compute,
            "fallback": self.fallback,
            "hop": self.hop,
        }


@dataclass(eq=False)
class Pace:
    """When the tokens of one sample left the router."""

    first_token: float | None = None
    last_token: float | None = None  # the latest one
    num_tokens: int = 0

    def tokens_left(self, now: float, count: int) -> list[float]:
        """Record that `count` tokens left together; returns their inter-token gaps.

        The first token of a message carries the gap since the previous message, the others 0;
        the first token of the sample has no gap, so its message returns one value fewer.
        """
        if count < 1:
            return []
        gaps = [0.0] * (count - 1)
        if self.last_token is None:
            self.first_token = now
        else:
            gaps.insert(0, now - self.last_token)
        self.last_token = now
        self.num_tokens += count
        return gaps

    @property
    def tpot(self) -> float | None:
        """(last - first) / (tokens - 1), seconds; None for fewer than two tokens."""
        if self.first_token is None or self.last_token is None or self.num_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.num_tokens - 1)


@dataclass(eq=False)
class Timeline:
    """Events of one request. `placed` moves when it is placed again before its first token.

    A request of several samples is as fast as the slowest of them.
    """

    arrived: float
    admitted: float | None = None  # valid, and in the admission queue
    placed: float | None = None  # on the decode worker that gave the first token
    worker_parts: FirstTokenParts = field(default_factory=FirstTokenParts)
    samples: dict[int, Pace] = field(default_factory=dict)  # those with tokens, by index

    def tokens_left(self, now: float, count: int, sample_index: int = 0) -> list[float]:
        """Record that `count` tokens of one sample left together; returns their inter-token gaps,
        as `Pace.tokens_left` does.
        """
        return self.samples.setdefault(sample_index, Pace()).tokens_left(now, count)

    @property
    def num_tokens(self) -> int:
        return sum(pace.num_tokens for pace in self.samples.values())

    @property
    def first_token(self) -> float | None:
        """When the first token left the router."""
        return min(self._times("first_token"), default=None)

    @property
    def last_token(self) -> float | None:
        """When the latest one left."""
        return max(self._times("last_token"), default=None)

    def _times(self, name: str) -> list[float]:
        times = [getattr(pace, name) for pace in self.samples.values()]
        return [time for time in times if time is not None]

    @property
    def queue(self) -> float | None:
        """Arrival until placed, seconds; None before."""
        return None if self.placed is None else self.placed - self.arrived

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def tpot(self) -> float | None:
        """Of the slowest sample, seconds; None when none has two tokens."""
        return max(self._times("tpot"), default=None)

    @property
    def e2e(self) -> float | None:
        return None if self.last_token is None else self.last_token - self.arrived

    def parts(self) -> TtftParts | None:
        """TTFT taken apart; None before the first token."""
        if self.ttft is None or self.queue is None:
            return None
        parts = self.worker_parts
        known = TtftParts(
            queue=self.queue,
            reservation=parts.reservation,
            prefill_queue=parts.prefill_queue,
            prefill_compute=parts.prefill_compute,
            fallback=parts.fallback,
            hop=0.0,
        )
        return TtftParts(**{**known.as_dict(), "hop": self.ttft - known.attributed})
