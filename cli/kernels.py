"""Compiles the kernels before any process needs them, so that one does it and a person sees it."""

from __future__ import annotations

import asyncio
import os

from cli.say import say
from tasuki.cache_root import cache_root
from tasuki.native.build import NativeBuildError, ensure_library, library_path


async def prepare_kernels() -> bool:
    """Whether workers can use compiled kernels. Says in one line what takes long or went wrong."""
    cache = cache_root(os.environ)
    try:
        if not library_path(cache).exists():
            say("Compiling the kernels, once on this machine: about half a minute.")
        await asyncio.to_thread(ensure_library, cache)
    except NativeBuildError as error:
        say(f"Going on without compiled kernels, at half the speed: {error}")
        return False
    return True
