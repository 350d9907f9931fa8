"""Files of a dataset on the Hugging Face hub, with the standard library alone.

`HF_ENDPOINT` names another hub or a mirror, `HF_TOKEN` is sent to it if set (and to no other host). Downloads are large
and connections break, so a file grows under the name `<name>.part` and is continued from where it stopped: after a cut,
after Ctrl-C, after `kill -9`. Its sha256, which the hub lists, is checked before anybody sees it.
"""

import contextlib
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import IO, Any, TypeVar

from speedrun.errors import UserError
from speedrun.files import explained, sha256_file

ATTEMPTS = 5  # in a row without a new byte
PAUSE = 0.5  # seconds before the second attempt; doubles with each further one
LONGEST_PAUSE = 60.0  # however long the server asks to wait
TIMEOUT = 30.0  # seconds without a byte are a cut connection
BLOCK = 1 << 20

T = TypeVar("T")


@dataclass(frozen=True)
class Remote:
    size: int
    sha256: str


class Cut(Exception):
    """A failure that may pass: no connection, a broken one, or a server that is busy or ill."""

    def __init__(self, what: str, *, code: int = 0, after: float = 0.0) -> None:
        super().__init__(what)
        self.code, self.after = code, after


def endpoint() -> str:
    named = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or "https://huggingface.co"
    try:
        parts = urllib.parse.urlsplit(named)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good or not named.isascii() or re.search(r"\s", named):
        raise UserError(f"HF_ENDPOINT is {named!r}, which is no address; write it like https://huggingface.co.")
    return named


def list_files(dataset: str) -> dict[str, Remote]:
    """Size and sha256 of every large file of a dataset, by path."""
    found: dict[str, Remote] = {}
    url = f"{endpoint()}/api/datasets/{dataset}/tree/main?recursive=true"
    seen: set[str] = set()
    while url:
        if url in seen:
            raise UserError(f"{endpoint()} lists the files of {dataset} in a circle; check HF_ENDPOINT.")
        seen.add(url)
        entries, url = _patiently(lambda url=url: _page(url, dataset))  # type: ignore[misc]
        for entry in entries:
            if isinstance(entry, dict) and isinstance(entry.get("lfs"), dict):
                path, size, oid = entry.get("path"), entry.get("size"), entry["lfs"].get("oid")
                if isinstance(path, str) and type(size) is int and re.fullmatch(r"[0-9a-f]{64}", str(oid)):
                    found[path] = Remote(size, str(oid))
    return found


def _page(url: str, dataset: str) -> tuple[list[Any], str]:
    """One page of a listing, and the address of the next one or nothing."""
    with _open(url, dataset) as response, _passing("the list of files"):
        body = response.read()
        link = response.headers.get("Link", "")
    try:
        entries = json.loads(body)
    except ValueError:
        entries = None
    if not isinstance(entries, list):
        raise UserError(f"{endpoint()} answers with something else than a list of files; check HF_ENDPOINT.")
    following = re.search(r'<([^>]*)>\s*;[^,]*\brel="?next"?', link)
    return entries, urllib.parse.urljoin(url, following[1]) if following else ""


def download(
    dataset: str,
    name: str,
    remote: Remote,
    folder: Path,
    *,
    tick: Callable[[int], None] = lambda done: None,
    notice: Callable[[str], None] = print,
) -> Path:
    """`<name>.part` in `folder`, complete and checked; the caller gives it its name. `tick` hears the bytes so far."""
    part = folder / f"{name}.part"
    found = ""
    for attempt in (1, 2):
        _patiently(lambda: _continue(dataset, name, remote.size, part, tick), lambda: _size(part))
        found = sha256_file(part)
        if found == remote.sha256:
            return part
        part.unlink()
        if attempt == 1:
            notice(f"{name} came with wrong bytes; downloading it once more, from the start")
    raise UserError(
        f"{name} came with wrong bytes twice: its sha256 is {found[:12]}..., not {remote.sha256[:12]}... as "
        f"{endpoint()} lists it; try again later, or another HF_ENDPOINT."
    )


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _continue(dataset: str, name: str, size: int, part: Path, tick: Callable[[int], None]) -> None:
    """One connection: take what is missing of the part, or as much of it as comes."""
    kept = _size(part)
    if kept > size:  # of some other file
        part.unlink()
        kept = 0
    tick(kept)
    if kept == size:
        return
    url = f"{endpoint()}/datasets/{dataset}/resolve/main/{urllib.parse.quote(name)}"
    try:
        response = _open(url, dataset, {"Range": f"bytes={kept}-"} if kept else {})
    except Cut as e:
        if e.code == 416:  # the part and the server's file do not belong together
            part.unlink(missing_ok=True)
        raise
    with response:
        if response.status == 206:
            begin = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
            if begin is None or int(begin[1]) != kept:
                part.unlink(missing_ok=True)
                raise Cut(f"{name}: another range than the one asked for")
        else:
            kept = 0  # the whole file comes, whatever was asked for
        with explained(part), open(part, "ab") as file:
            file.truncate(kept)
            while kept < size:
                with _passing(name):
                    block = response.read1(min(BLOCK, size - kept))
                if not block:
                    raise Cut(f"{name} broke off after {kept:,} of {size:,} bytes")
                file.write(block)
                file.flush()  # so that a killed process leaves all that it had
                kept += len(block)
                tick(kept)


# --- requests ---


def _origin(url: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.netloc


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects, but hand the token to nobody else: large files lie on other hosts."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        following = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        if following is not None and _origin(newurl) != _origin(req.full_url):
            following.remove_header("Authorization")
        return following


def _open(url: str, dataset: str, headers: dict[str, str] | None = None) -> http.client.HTTPResponse:
    request = urllib.request.Request(url, headers={"User-Agent": "speedrun", **(headers or {})})
    token = os.environ.get("HF_TOKEN", "").strip()
    if token and _origin(url) == _origin(endpoint()):
        if not re.fullmatch(r"[!-~]+", token):
            raise UserError("HF_TOKEN holds characters that no token has; copy it again, or unset it.")
        request.add_header("Authorization", f"Bearer {token}")
    with _passing(urllib.parse.urlsplit(url).netloc):
        try:
            opened: http.client.HTTPResponse = urllib.request.build_opener(_Redirects).open(request, timeout=TIMEOUT)
            return opened
        except urllib.error.HTTPError as e:
            e.close()
            raise _refusal(e, dataset) from e


def _refusal(error: urllib.error.HTTPError, dataset: str) -> Exception:
    """A server that is busy or ill may be asked again; other answers will not change."""
    if error.code in (408, 416, 429) or error.code >= 500:
        after = str(error.headers.get("Retry-After", ""))
        return Cut(f"HTTP {error.code}", code=error.code, after=float(after) if after.isdecimal() else 0.0)
    if error.code in (401, 403):
        return UserError(
            f"{endpoint()} refuses access to {dataset} (HTTP {error.code}); set HF_TOKEN to a token that may read it, "
            "or unset it if it is out of date."
        )
    if error.code == 404:
        return UserError(f"{endpoint()} has no dataset or file {dataset} (HTTP 404); check HF_ENDPOINT.")
    return UserError(f"{endpoint()} answers HTTP {error.code} for {dataset}; check HF_ENDPOINT.")


@contextlib.contextmanager
def _passing(what: str) -> Iterator[None]:
    """Whatever goes wrong with a connection is a Cut."""
    try:
        yield
    except (OSError, http.client.HTTPException) as e:
        cause = getattr(e, "reason", e)  # urllib wraps the socket's error
        raise Cut(f"{what}: {getattr(cause, 'strerror', None) or str(cause) or type(cause).__name__}") from e


def _patiently(attempt: Callable[[], T], place: Callable[[], int] = lambda: 0) -> T:
    """Try until it works; give up after ATTEMPTS failures in a row that brought `place` no further than ever before."""
    failures, best = 0, place()
    while True:
        try:
            return attempt()
        except Cut as e:
            here = place()
            failures = 1 if here > best else failures + 1
            best = max(best, here)
            if failures >= ATTEMPTS:
                raise UserError(
                    f"{endpoint()} does not deliver, after {failures} attempts ({e}); check the network, proxies and "
                    "HF_ENDPOINT, then run the command again: what has come is kept."
                ) from e
            time.sleep(max(PAUSE * 2 ** (failures - 1), min(e.after, LONGEST_PAUSE)))
