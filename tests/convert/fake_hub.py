"""A hub on this machine that serves one directory as one model, over HTTP as huggingface_hub asks.

It can also say that there is no such model, or answer nonsense.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REVISION = "b" * 40


class FakeHub(http.server.ThreadingHTTPServer):
    """`behaviour` is one of fine, unknown, nonsense."""

    daemon_threads = True

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name = name
        self.directory = directory
        self.behaviour = "fine"
        self.served: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def files(self) -> list[str]:
        found = [path for path in self.directory.rglob("*") if path.is_file()]
        return sorted(str(path.relative_to(self.directory)) for path in found)


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"  # no connection outlives its answer
    server: FakeHub

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        hub, path = self.server, self.path.split("?")[0]
        if hub.behaviour == "unknown":
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"}, body)
        elif hub.behaviour == "nonsense":
            self._send(200, b'"what?"', {"Content-Type": "application/json"}, body)
        elif path.startswith(f"/api/models/{hub.name}/tree/"):
            files = [{"type": "file", "path": f, "size": 1, "oid": "0"} for f in hub.files()]
            self._send_json(files, body)
        elif path.startswith(f"/api/models/{hub.name}"):
            siblings = [{"rfilename": file} for file in hub.files()]
            self._send_json({"id": hub.name, "sha": REVISION, "siblings": siblings}, body)
        else:
            self._send_file(path.removeprefix(f"/{hub.name}/resolve/{REVISION}/"), body)

    def _send_file(self, name: str, body: bool) -> None:
        if name not in self.server.files():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
            return
        content = (self.server.directory / name).read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": REVISION}
        self._send(200, content, headers, body)
        if body:
            self.server.served.append(name)

    def _send_json(self, value: object, body: bool) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, body)

    def _send(self, code: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)
