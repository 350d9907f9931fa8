"""A stand-in for the Hugging Face hub: a real HTTP server on loopback that serves small shards, and errs on demand.

`Hub` lists its files in pages of two, answers Range requests, sends downloads to a second host name, and keeps a log of
what it was asked. Its `faults` are answers that it gives instead of the next ones to a path, in order.
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
TREE = f"/api/datasets/{fineweb.DATASET}/tree/main"
RESOLVE = f"/datasets/{fineweb.DATASET}/resolve/main/"
STORE = "/store/"  # where the files themselves lie


def shard(tokens: int, seed: int) -> bytes:
    """A shard of documents of 40 GPT-2 tokens."""
    stream = np.random.default_rng(seed).integers(0, 50000, size=tokens)
    stream[::40] = 50256
    return shards._header(tokens) + stream.astype(shards.TOKEN).tobytes()


@dataclass(frozen=True)
class Asked:
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
        path, _, query = to.path.partition("?")
        begin = to.headers.get("Range")
        offset = int(begin.removeprefix("bytes=").rstrip("-")) if begin else None
        self.log.append(Asked(path, offset, to.headers.get("Authorization"), to.headers["Host"]))
        if self.faults.get(path):
            self.faults[path].pop(0)(to)
        elif path == TREE:
            self.tree(to, int(query.partition("cursor=")[2] or 0))
        elif path.startswith(RESOLVE):
            to.send_response(302)
            to.send_header("Location", f"http://localhost:{self.port}{STORE}{path.removeprefix(RESOLVE)}")
            to.send_header("Content-Length", "0")
            to.end_headers()
        elif path.startswith(STORE):
            send(to, self.files[path.removeprefix(STORE)], offset if self.ranges else None)
        else:
            to.send_error(404)

    def tree(self, to: Any, first: int) -> None:
        names = sorted(self.files)
        entries: list[dict[str, Any]] = [
            {"type": "file", "path": name, "size": len(self.files[name]), "oid": "0", "lfs": {"oid": self.listed[name]}}
            for name in names[first : first + 2]
        ]
        entries.append({"type": "file", "path": "README.md", "size": 10, "oid": "0"})
        body = json.dumps(entries).encode()
        to.send_response(200)
        if first + 2 < len(names):
            to.send_header("Link", f'<{self.url}{TREE}?recursive=true&cursor={first + 2}>; rel="next"')
        to.send_header("Content-Length", str(len(body)))
        to.end_headers()
        to.wfile.write(body)


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
