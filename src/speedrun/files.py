"""Files that are either whole or absent, whatever happens while they are written.

Everything that must survive `kill -9` goes through here: write beside the destination, fsync, rename, fsync the
folder. A reader therefore sees the old content or the new one, never half of either.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs

from speedrun.errors import UserError


def home() -> Path:
    """Where prepared corpora live: `SPEEDRUN_HOME`, or the user's cache folder."""
    named = os.environ.get("SPEEDRUN_HOME")
    return Path(named).expanduser() if named else Path(platformdirs.user_cache_dir("speedrun"))


def sha256_file(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def fsync_file(path: Path) -> None:
    with open(path, "rb") as f:
        os.fsync(f.fileno())


def fsync_folder(path: Path) -> None:
    """Make renames inside `path` durable. Not every platform can open a folder; those that cannot need no fsync."""
    if os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn the file errors a person can mend into a sentence. `path` is what was being written."""
    try:
        yield
    except PermissionError as e:
        raise UserError(f"{path} cannot be written: permission denied. Choose another folder.") from e
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as e:
        raise UserError(f"{e.filename or path} is in the way: a file where a folder is needed, or the reverse.") from e
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"The disk is full while writing {path}. Free some space; what was there is kept.") from e
        if e.errno == errno.EROFS:
            raise UserError(f"{path} cannot be written: read-only file system. Choose another folder.") from e
        raise


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace `path` by `data` in one step."""
    if isinstance(data, str):
        data = data.encode()
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(fd, "wb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        fsync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=1, sort_keys=False, allow_nan=True) + "\n")


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` when the block ends well, and vanishes when it does not.

    A folder already at `path` is replaced. Temporary folders of killed processes are swept on the next call.
    """
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for stale in path.parent.glob(f".{path.name}.tmp-*"):
            owner = stale.name.rsplit("-", 1)[-1]
            if not (owner.isdigit() and _alive(int(owner))):
                shutil.rmtree(stale, ignore_errors=True)
        temporary = path.parent / f".{path.name}.tmp-{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_file():
                    fsync_file(file)
                else:
                    fsync_folder(file)
            fsync_folder(temporary)
            if path.exists():
                old = path.parent / f".{path.name}.old-{os.getpid()}"
                os.replace(path, old)
                os.replace(temporary, path)
                shutil.rmtree(old, ignore_errors=True)
            else:
                os.replace(temporary, path)
            fsync_folder(path.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
