"""Starts an engine in this process or thread: load, warm up, say so, serve.

What comes before `EngineReady` and what may go wrong on the way stands here, once for both forms.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeAlias

import torch

from tasuki import config as configuration
from tasuki.config import WorkerConfig
from tasuki.engine.core import Host, WorkerCore
from tasuki.engine.engine import Engine
from tasuki.engine.loop import EngineLoop, status_of
from tasuki.engine.memory import MIB
from tasuki.engine.transport import SocketTransport, Transport
from tasuki.errors import TasukiError
from tasuki.messages import EngineFailed, EngineReady
from tasuki.model import exactness

log = logging.getLogger(__name__)

CoreFactory: TypeAlias = Callable[[Engine, WorkerConfig, int, Host], WorkerCore]
"""(engine, config, worker_epoch, host) -> the role's core."""


def serve(
    config: WorkerConfig,
    make_core: CoreFactory,
    transport: Transport,
    *,
    allocate_whole_prompt: bool,
) -> int:
    """Load the engine and run its loop until the server ends it; returns an exit code."""
    try:
        engine = Engine.load(config, allocate_whole_prompt=allocate_whole_prompt)
        engine.warm_up()
        epoch = secrets.randbits(64)
        log.info("memory: %s", memory(engine))
        loop = EngineLoop(
            engine,
            transport,
            lambda host: make_core(engine, config, epoch, host),
            step_timeout=config.step_timeout,
        )
    except TasukiError as error:
        transport.send(EngineFailed(error=status_of(error)))
        transport.close()
        return 1
    transport.send(
        EngineReady(
            worker_epoch=epoch,
            engine_pid=os.getpid(),
            layout=engine.identity,
            num_blocks=engine.blocks.pool.num_blocks,
            block_bytes=engine.cache.layout.block_bytes,
            max_model_len=engine.max_model_len,
            vocab_size=engine.model.config.vocab_size,
            facts=facts(engine),
        )
    )
    gc.collect()
    gc.freeze()  # a full collection of what never dies would pause every stream
    return loop.run()


def facts(engine: Engine) -> dict[str, str]:
    """What was chosen or measured at start."""
    layout, pool = engine.cache.layout, engine.blocks.pool
    return {
        **engine.model.facts(),
        "exactness": exactness.WORDS[engine.exact],
        "torch": str(torch.__version__),
        "threads": str(torch.get_num_threads()),
        "kv_blocks": f"{pool.num_blocks} of {layout.block_bytes} bytes",
        "memory": memory(engine),
        "max_num_batched_tokens": str(engine.scheduler.config.max_num_batched_tokens),
        "prefill_tokens_per_second": f"{engine.prefill_tokens_per_second:.0f}",
    }


def memory(engine: Engine) -> str:
    """Where this process's memory on its device goes, in words."""
    weights = engine.model.config.weight_bytes(engine.model.dtype)
    cache = engine.cache.nbytes
    whole = weights + cache + engine.overhead
    device = engine.model.device
    where = "" if device.type == "cpu" else f" on {device}"
    return (
        f"{whole // MIB} MiB resident{where}: {weights // MIB} weights, prepacked once, "
        f"{cache // MIB} KV cache, {engine.overhead // MIB} everything else"
    )


def main(
    make_core: CoreFactory,
    *,
    allocate_whole_prompt: bool,
    prog: str,
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """The engine process: started by its server process with a socket to talk on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the server, which drains first
    config = configuration.load(WorkerConfig, prog, "Engine process of a worker.", argv)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s {prog} %(message)s"
    )
    if config.engine_fd < 0:
        sys.exit(f"{prog}: an engine process is started by its worker, not by hand")
    transport = SocketTransport(socket.socket(fileno=config.engine_fd))
    code = serve(config, make_core, transport, allocate_whole_prompt=allocate_whole_prompt)
    logging.shutdown()
    # A fenced link may leave a thread waiting inside gloo; nothing of ours is left to tear down.
    os._exit(code)
