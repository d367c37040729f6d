"""What an operator may ask of a running engine, and its answers. A command is known by a number."""

from __future__ import annotations

from tasuki.messages.base import Message

MAX_PROFILE_STEPS = 256


class ResetPrefixCache(Message, frozen=True):
    """Share nothing any more that was computed until now."""

    command_id: int


class PrefixCacheReset(Message, frozen=True):
    command_id: int
    blocks: int  # how many could have been shared


class CaptureProfile(Message, frozen=True):
    """Record the operators of the next steps."""

    command_id: int
    num_steps: int  # 1 to MAX_PROFILE_STEPS
    seconds: float  # how long to wait for so many


class ProfileCaptured(Message, frozen=True):
    command_id: int
    steps: int  # fewer than asked for where there was too little work
    table: str  # operators by the time spent in them, for people
    trace: bytes  # gzip of Chrome trace JSON; empty when there was no step, or it was too large


class InjectFault(Message, frozen=True):
    """Do to the links of this worker what a bad network does."""

    command_id: int
    kind: str  # cut | slow | corrupt
    amount: float  # bytes per second, or segments; 0 ends a slowness


class FaultInjected(Message, frozen=True):
    command_id: int
    injected: bool  # False: the worker was started without fault injection


Command = ResetPrefixCache | CaptureProfile | InjectFault
CommandResult = PrefixCacheReset | ProfileCaptured | FaultInjected
