"""Files of a dataset on the Hugging Face hub, by its own client, `huggingface_hub`.

`HF_ENDPOINT` names another hub or a mirror, `HF_TOKEN` is sent to it if set (and to no other host). The client goes on
after a cut connection; what it brings is checked by the sha256 that the hub lists, before anybody sees it.
"""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from speedrun.errors import UserError
from speedrun.files import sha256_file

if TYPE_CHECKING:  # a second of imports, and few commands need it
    from huggingface_hub import HfApi

PAUSES = 1.0, 5.0  # seconds before the second and the third attempt
TIMEOUT = 30.0  # seconds to wait for the list of files

T = TypeVar("T")
Notice = Callable[[str], None]


@dataclass(frozen=True)
class Remote:
    size: int
    sha256: str


def endpoint() -> str:
    named = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or "https://huggingface.co"
    if not re.fullmatch(r"https?://([^\s/@]+@)?([\w.-]+|\[[\da-fA-F:.]+\])(:\d+)?(/\S*)?", named, re.ASCII):
        raise UserError(f"HF_ENDPOINT is {named!r}, which is no address; write it like https://huggingface.co.")
    return named


def _client() -> "HfApi":
    from huggingface_hub import HfApi

    token = os.environ.get("HF_TOKEN", "").strip()
    if not re.fullmatch(r"[!-~]*", token):
        raise UserError("HF_TOKEN holds characters that no token has; copy it again, or unset it.")
    return HfApi(endpoint(), token or False)  # False: not one that lies in the user's folder


def list_files(dataset: str, notice: Notice) -> dict[str, Remote]:
    """Size and sha256 of every large file of a dataset, by path."""
    client = _client()

    def ask() -> dict[str, Remote]:
        try:
            found = client.dataset_info(dataset, files_metadata=True, timeout=TIMEOUT).siblings or ()
        except (LookupError, TypeError, AttributeError, ValueError) as e:
            if _status(e):  # a refusal may be a ValueError, too
                raise
            raise UserError(f"{endpoint()} answers with something else than a list of files; check HF_ENDPOINT.") from e
        large = ((file.rfilename, file.lfs) for file in found if file.lfs)
        return {name: Remote(lfs.size, lfs.sha256) for name, lfs in large if type(lfs.size) is int}

    return _patiently(ask, dataset, notice)


def download(dataset: str, name: str, remote: Remote, folder: Path, notice: Notice) -> Path:
    """The file in `folder`, which is the client's own, complete and checked; the caller gives it its place."""
    client = _client()

    def ask() -> Path:
        path = Path(client.hf_hub_download(dataset, name, repo_type="dataset", local_dir=folder))
        found = sha256_file(path)
        if found != remote.sha256:
            path.unlink()
            raise ValueError(f"{name} came with sha256 {found[:12]}..., not {remote.sha256[:12]}... as it is listed")
        return path

    return _patiently(ask, dataset, notice)


def _patiently(ask: Callable[[], T], dataset: str, notice: Notice) -> T:
    """Ask until it works: a server that is busy or ill may be asked again; other answers will not change."""
    for pause in (*PAUSES, None):
        try:
            return ask()
        except UserError:
            raise
        except Exception as e:  # the client's errors have no common class
            if isinstance(e, OSError) and e.errno:  # of the disk: those of the network carry no number
                raise
            code = _status(e)
            if code in (401, 403):
                raise UserError(
                    f"{endpoint()} refuses access to {dataset} (HTTP {code}); set HF_TOKEN to a token that may read "
                    "it, or unset it if it is out of date."
                ) from e
            if code == 404:
                raise UserError(f"{endpoint()} has no dataset or file {dataset} (HTTP 404); check HF_ENDPOINT.") from e
            if 400 <= code < 500 and code not in (408, 416, 429):
                raise UserError(f"{endpoint()} answers HTTP {code} for {dataset}; check HF_ENDPOINT.") from e
            cause = e.__cause__ or e
            why = f"HTTP {code}" if code else (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")
            if pause is None:
                raise UserError(
                    f"{endpoint()} does not deliver, after {len(PAUSES) + 1} attempts ({why}); check the network, "
                    "proxies and HF_ENDPOINT, then run the command again: files that have come are kept."
                ) from e
        notice(f"{why}; trying again")
        time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _status(error: BaseException) -> int:
    """The HTTP status that an error is about, or 0."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    return int(response.status_code) if response is not None else 0
