"""Their side: two vLLM servers on this machine, a core each, joined by the NixlConnector over TCP.

A request goes the way vLLM's own proxies send it: to the producer with a wish to have it decoded
elsewhere, then to the consumer with what the producer answered.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import IO, Any

from benchmarks.handed_over import HandedOver, handed_over
from benchmarks.nixl_server import PROGRESS_DELAY
from benchmarks.pinning import own_cores, pinned

LOOPBACK = "127.0.0.1"
START_TIMEOUT = 600.0  # seconds; minutes where the machine has other work
REQUEST_TIMEOUT = 120.0
STOP_TIMEOUT = 10.0
DELAY = 1000  # microseconds
LAST_WORDS = 2000  # characters of a log

WISH = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip


class PeerError(Exception):
    """The peer is missing, did not start, or did not do what was asked."""


def check(python: Path) -> None:
    """Raise PeerError unless this Python has what the peer consists of."""
    packages = "import importlib.util as u; print(*(n for n in ('vllm', 'nixl') if not {}))"
    command = [str(python), "-c", packages.format("u.find_spec(n)")]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PeerError(f"the peer's Python cannot be run: {error}") from None
    if missing := found.stdout.split():
        raise PeerError(f"the peer's Python, {python}, has no {' and no '.join(missing)}")


@dataclass(frozen=True)
class Transfers:
    """What a consumer's metrics sum up, of all transfers until now."""

    count: int
    seconds: float
    nbytes: int

    @classmethod
    def parse(cls, text: str) -> Transfers:
        """From the text that its /metrics answers; all zero before the first transfer."""

        def total(name: str) -> float:
            return sum(map(float, re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", text, re.M)))

        return cls(
            int(total("nixl_xfer_time_seconds_count")),
            total("nixl_xfer_time_seconds_sum"),
            int(total("nixl_bytes_transferred_sum")),
        )

    def since(self, before: Transfers) -> Transfers:
        return Transfers(
            self.count - before.count, self.seconds - before.seconds, self.nbytes - before.nbytes
        )


class Server:
    """One vLLM server on one core; `log` has what it says."""

    def __init__(
        self, python: Path, model: Path, role: str, core: int, dtype: str, corrected: bool
    ) -> None:
        self._role = role
        self.port, side = free_port(), free_port()
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `close`
        with pinned(core):
            self._process = subprocess.Popen(
                [
                    str(python), "-P", str(Path(__file__).with_name("nixl_server.py")),
                    f"--model={model}", "--served-model-name=demo", f"--host={LOOPBACK}",
                    f"--port={self.port}", f"--dtype={dtype}", "--max-model-len=2048",
                    "--max-num-batched-tokens=2048", "--max-num-seqs=8", "--enforce-eager",
                    "--no-enable-prefix-caching", f"--kv-transfer-config={connector(role)}",
                ],
                env=environment(core, side, corrected), stdin=subprocess.PIPE,
                stdout=self._log, stderr=self._log, start_new_session=True,
            )  # fmt: skip

    def wait_ready(self, until: float) -> None:
        while True:
            try:
                with closing(HTTPConnection(LOOPBACK, self.port, timeout=1.0)) as connection:
                    connection.request("GET", "/health")
                    if connection.getresponse().status == 200:
                        return
            except OSError:
                pass
            if self._process.poll() is not None or time.monotonic() > until:
                self._log.seek(0)
                words = self._log.read()[-LAST_WORDS:]
                raise PeerError(f"the {self._role} did not start; its last words:\n{words}")
            time.sleep(0.1)

    def post(self, body: dict[str, Any]) -> tuple[HTTPConnection, HTTPResponse]:
        connection = HTTPConnection(LOOPBACK, self.port, timeout=REQUEST_TIMEOUT)
        head = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), head)
        response = connection.getresponse()
        if response.status != 200:
            raise PeerError(f"the {self._role} answered {response.status}: {response.read()!r}")
        return connection, response

    def transfers(self) -> Transfers:
        with closing(HTTPConnection(LOOPBACK, self.port, timeout=REQUEST_TIMEOUT)) as connection:
            connection.request("GET", "/metrics")
            return Transfers.parse(connection.getresponse().read().decode())

    def close(self) -> None:
        """End it and what it started."""
        self._process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT)
        finally:
            with suppress(ProcessLookupError):  # else its engine still runs
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._log.close()


def connector(role: str) -> str:
    return json.dumps(
        {"kv_connector": "NixlConnector", "kv_role": f"kv_{role}", "kv_buffer_device": "cpu"}
    )


def environment(core: int, side_port: int, corrected: bool) -> dict[str, str]:
    """Ours, less what concerns our Python, and what vLLM and UCX need on one machine."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
        "PYTHONSAFEPATH": "1",
    }  # fmt: skip
    return env | {PROGRESS_DELAY: str(DELAY)} if corrected else env


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as listener:
        return int(listener.getsockname()[1])


class Pair:
    """A producer and a consumer that are ready."""

    def __init__(self, producer: Server, consumer: Server) -> None:
        self._producer = producer
        self._consumer = consumer

    def ask(self, prompt: Sequence[int], tokens: int) -> HandedOver:
        """Raises PeerError when no KV was transferred for it."""
        before = self._consumer.transfers()
        body: dict[str, Any] = {
            "model": "demo", "prompt": list(prompt), "temperature": 0.0, "ignore_eos": True,
        }  # fmt: skip
        connection, response = self._producer.post(
            body | {"max_tokens": 1, "kv_transfer_params": WISH}
        )
        with closing(connection):
            answer = json.loads(response.read())
        answered = time.monotonic()
        body |= {"kv_transfer_params": answer["kv_transfer_params"], "return_token_ids": True}
        connection, response = self._consumer.post(body | {"max_tokens": tokens, "stream": True})
        with closing(connection):
            said = list(streamed(response))
        done = self._transferred(before)
        return handed_over(done.nbytes, done.seconds, answered, said)

    def _transferred(self, before: Transfers) -> Transfers:
        until = time.monotonic() + REQUEST_TIMEOUT
        while (done := self._consumer.transfers().since(before)).count < 1:
            if time.monotonic() > until:
                raise PeerError("the consumer's metrics never showed a transfer")
            time.sleep(0.05)
        if done.count > 1:
            raise PeerError(f"the consumer counted {done.count} transfers for one request")
        return done


def streamed(lines: Iterator[bytes] | HTTPResponse) -> Iterator[tuple[float, int]]:
    """Time and id of each token of an answer that comes as server-sent events."""
    for line in lines:
        if not line.startswith(b"data: {"):
            continue
        now = time.monotonic()
        for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
            for token_id in choice.get("token_ids") or ():
                yield now, int(token_id)


@contextmanager
def running(python: Path, model: Path, *, dtype: str, corrected: bool) -> Iterator[Pair]:
    """Start both, and end both with the block. Raises PeerError when they do not start."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(closing(Server(python, model, role, core, dtype, corrected)))
            for role, core in zip(("producer", "consumer"), own_cores(), strict=True)
        ]
        until = time.monotonic() + START_TIMEOUT
        for server in servers:
            server.wait_ready(until)
        yield Pair(*servers)
