"""A stand-in for the Hugging Face hub: a real HTTP server on loopback that serves small shards, and errs on demand.

`Hub` lists its files, answers Range requests, sends downloads to a second host name, and keeps a log of what it was
asked. Its `faults` are answers that it gives instead of the next ones to a path, in order.
"""

import http.server
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from speedrun.data import fineweb, shards
from speedrun.files import sha256_bytes

Handler = http.server.BaseHTTPRequestHandler
INFO = f"/api/datasets/{fineweb.DATASET}"
RESOLVE = f"/datasets/{fineweb.DATASET}/resolve/main/"
STORE = "/store/"  # where the files themselves lie


def shard(tokens: int, seed: int) -> bytes:
    """A shard of documents of 40 GPT-2 tokens."""
    stream = np.random.default_rng(seed).integers(0, 50000, size=tokens)
    stream[::40] = 50256
    return shards._header(tokens) + stream.astype(shards.TOKEN).tobytes()


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    offset: int | None
    """Where the Range asked for begins."""
    token: str | None
    host: str


class Hub:
    def __init__(self, chunks: int = 3, tokens: int = 4000) -> None:
        names = [fineweb.VAL, *(fineweb.train_name(chunk) for chunk in range(1, chunks + 1))]
        self.files = {name: shard(tokens, seed) for seed, name in enumerate(names)}
        self.listed = {name: sha256_bytes(data) for name, data in self.files.items()}
        self.log: list[Asked] = []
        self.faults: dict[str, list[Callable[[Any], None]]] = {}
        self.ranges = True
        hub = self

        class Answers(Handler):
            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self.server.daemon_threads = True
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def asked(self, name: str) -> list[int | None]:
        """The offsets at which the bytes of a file were asked for."""
        return [asked.offset for asked in self.log if asked.path == STORE + name]

    def fault(self, name: str, *faults: Callable[[Any], None]) -> None:
        self.faults.setdefault(STORE + name, []).extend(faults)

    def answer(self, to: Any) -> None:
        path = to.path.partition("?")[0]
        begin = to.headers.get("Range")
        offset = int(begin.removeprefix("bytes=").rstrip("-")) if begin else None
        self.log.append(Asked(to.command, path, offset, to.headers.get("Authorization"), to.headers["Host"]))
        if self.faults.get(path):
            self.faults[path].pop(0)(to)
        elif path == INFO:
            send(to, self.listing(), None)
        elif path.startswith(RESOLVE):
            name = path.removeprefix(RESOLVE)
            to.send_response(302)
            to.send_header("Location", f"http://localhost:{self.port}{STORE}{name}")
            to.send_header("X-Repo-Commit", "0" * 40)
            to.send_header("X-Linked-Etag", f'"{self.listed[name]}"')
            to.send_header("X-Linked-Size", str(len(self.files[name])))
            to.send_header("Content-Length", "0")
            to.end_headers()
        elif path.startswith(STORE):
            send(to, self.files[path.removeprefix(STORE)], offset if self.ranges else None)
        else:
            to.send_error(404)

    def listing(self) -> bytes:
        """As the hub describes a dataset: small files lie in git, large ones elsewhere, by their sha256."""
        files: list[dict[str, Any]] = [{"rfilename": "README.md", "size": 10, "blobId": "0"}]
        for name, data in self.files.items():
            lfs = {"size": len(data), "sha256": self.listed[name], "pointerSize": 134}
            files.append({"rfilename": name, "size": len(data), "blobId": "0", "lfs": lfs})
        return json.dumps({"id": fineweb.DATASET, "sha": "0" * 40, "siblings": files}).encode()


def send(to: Any, data: bytes, offset: int | None, upto: int | None = None) -> None:
    """The bytes of a file from `offset`; with `upto` no further than that, though more is promised."""
    to.send_response(200 if offset is None else 206)
    if offset is not None:
        to.send_header("Content-Range", f"bytes {offset}-{len(data) - 1}/{len(data)}")
    to.send_header("Content-Length", str(len(data) - (offset or 0)))
    to.end_headers()
    to.wfile.write(data[offset or 0 : upto])
    to.close_connection = True


def cut(data: bytes, upto: int) -> Callable[[Any], None]:
    """Close the connection after byte `upto` of the file."""

    def fault(to: Any) -> None:
        begin = to.headers.get("Range")
        send(to, data, int(begin.removeprefix("bytes=").rstrip("-")) if begin else None, upto)

    return fault


def stall(data: bytes, upto: int, until: threading.Event) -> Callable[[Any], None]:
    """Send the first bytes, then nothing more until the event."""

    def fault(to: Any) -> None:
        to.send_response(200)
        to.send_header("Content-Length", str(len(data)))
        to.end_headers()
        to.wfile.write(data[:upto])
        to.wfile.flush()
        until.wait()
        to.close_connection = True

    return fault


def status(code: int, **headers: str) -> Callable[[Any], None]:
    def fault(to: Any) -> None:
        to.send_response(code)
        for name, value in headers.items():
            to.send_header(name.replace("_", "-"), value)
        to.send_header("Content-Length", "0")
        to.end_headers()

    return fault


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():  # the timeout of the test ends it otherwise
        time.sleep(0.02)
