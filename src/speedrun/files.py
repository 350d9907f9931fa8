"""Files that are either whole or absent, whatever happens while they are written, and the one reader of stored JSON.

Everything that must survive `kill -9` goes through here: write beside the destination, fsync, rename, fsync
the folder. A reader therefore sees the old content or the new one, never half of either.

A stored JSON file is of a known kind: a dataclass. `read_json` fills a missing field with its default, which means "as
it was before the field existed", and refuses an unknown field, a wrong type, an impossible value, or another format
number than FORMAT. `write_json` writes the format number.
"""

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import platformdirs

from speedrun.errors import OtherVersion, UserError, similar

T = TypeVar("T")
FORMAT = 2
"""Format of all stored JSON files; a file without a number has format 1."""
DELETE = "Delete that line."
LARGEST = 2**28
"""Bytes. A larger file is not a stored one, and reading it would fill the memory."""


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
    """Make renames inside `path` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turn file errors that a user can correct into a UserError. `path` is what was being written."""
    try:
        yield
    except PermissionError as e:
        raise UserError(f"{path} cannot be written: permission denied. Choose another folder.") from e
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as e:
        raise UserError(f"{e.filename or path} is in the way: a file where a folder is needed, or the reverse.") from e
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"The disk is full while writing {path}. Free some space; what was there is kept.") from e
        why = {errno.EROFS: "read-only file system", errno.ENOENT: "no folder can be made there"}.get(e.errno or 0)
        raise UserError(f"{path} cannot be written: {why or e.strerror or e}. Choose another folder.") from e


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write into, which becomes `path` when the block ends well, and vanishes when it does not."""
    try:
        path = path.resolve()  # a link stays a link
    except RuntimeError:
        raise UserError(f"{path} is a link to itself. Remove it, or choose another name.") from None
    with file_errors(path):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UserError(f"{path} is a device or a pipe, not a file. Choose another name.")
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=f".tmp-{os.getpid()}", dir=path.parent)
        try:
            with os.fdopen(fd, "wb") as f:
                yield f
                f.flush()
                os.fsync(f.fileno())
            os.chmod(temporary, 0o644)  # mkstemp gives 0600
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        fsync_folder(path.parent)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace `path` by `data` in one step."""
    with atomic_file(path) as f:
        f.write(data.encode() if isinstance(data, str) else data)


# -------------------------------------------------------------------- stored JSON


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object of a known kind, its format number first."""
    write_atomic(path, json.dumps({"format": FORMAT, **value}, indent=1, allow_nan=False) + "\n")


def read_json(path: Path, kind: type[T], way_out: str) -> T:
    """A stored JSON file as an object of its kind, or a UserError that names file, field and way out."""
    return from_json(read_object(path, way_out), kind, str(path), way_out)


def read_object(path: Path, way_out: str) -> dict[str, Any]:
    """A stored JSON file as JSON gives it, without its format number."""
    return decode_file(read_bytes(path, way_out), str(path), way_out)


def decode_file(content: bytes, where: str, way_out: str) -> dict[str, Any]:
    """The same of what was read already; another format is refused."""
    stored = decode_json(content, where, way_out)
    number = stored.pop("format", 1)
    if type(number) is not int or number < 1:
        raise UserError(f"{where} is damaged at format: {number!r} is not a format number. {way_out}")
    if number < FORMAT:
        raise OtherVersion(
            f"{where} was written by an older version of speedrun (format {number}; this one reads {FORMAT}): train, "
            "race or prepare it again, or use the version that wrote it."
        )
    if number > FORMAT:
        raise OtherVersion(
            f"{where} was written by a newer version of speedrun (format {number}; this one reads {FORMAT}): update "
            "speedrun, or use the version that wrote it."
        )
    return stored


def read_bytes(path: Path, way_out: str) -> bytes:
    """The content of a stored file, unless it cannot be one."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{path} is {'a folder' if path.is_dir() else 'not a file'}, not a stored file. {way_out}")
        if found.st_size > LARGEST:
            raise UserError(
                f"{path} has {found.st_size:,} bytes, but no stored file has more than {LARGEST:,}. {way_out}"
            )
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path} is missing. {way_out}") from None
    except NotADirectoryError:
        raise UserError(f"{path.parent} is a file, but the folder of {path.name} is needed.") from None
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}. {way_out}") from e


def read_lines(path: Path, way_out: str) -> Iterator[tuple[str, bytes, dict[str, Any]]]:
    """Each line of a file of JSON objects: what an error calls it, as it stands, and as JSON.

    What follows the last newline was torn by a kill and does not count.
    """
    whole, newline, _torn = read_bytes(path, way_out).rpartition(b"\n")
    for n, line in enumerate(whole.split(b"\n") if newline else (), start=1):
        where = f"Line {n} of {path}"
        yield where, line, decode_json(line, where, DELETE)


def decode_json(content: bytes, where: str, way_out: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(content)
    except RecursionError:
        raise UserError(f"{where} is damaged: its JSON is nested too deeply. {way_out}") from None
    except ValueError as e:  # malformed, truncated, not UTF-8
        raise UserError(f"{where} is damaged: {str(e).rstrip('.')}. {way_out}") from None
    if not isinstance(value, dict):
        raise UserError(f"{where} is damaged: it is not a JSON object. {way_out}")
    return value


def from_json(value: Mapping[str, Any], kind: type[T], where: str, way_out: str) -> T:
    """`value`, as JSON gives it, as an object of `kind`; `where` is what an error calls it."""
    try:
        found = msgspec.convert(value, kind, dec_hook=_as_path)
    except msgspec.ValidationError as e:
        found_at = re.fullmatch(r"(.*?)(?: - at (`key` in )?`\$\.?(.*)`)?", str(e), re.DOTALL)
        assert found_at is not None
        what, key, field = found_at.groups()
        place = f" at {'a key of ' if key else ''}{field}" if field else ""
        raise UserError(f"{where} is damaged{place}: {what.rstrip('.')}. {way_out}") from e
    except RecursionError:
        raise UserError(f"{where} is damaged: its JSON is nested too deeply. {way_out}") from None
    odd = _unknown(value, msgspec.to_builtins(found, enc_hook=str), "")
    if odd is not None:
        name, known = odd
        hint = similar(name.rpartition(".")[2], known)
        raise OtherVersion(
            f"{where} has the field {name!r}, which this version of speedrun does not know.{hint} {way_out}"
        )
    return found


def _as_path(kind: type, value: Any) -> Any:
    """What msgspec does not know by itself; whatever this returns must be of the kind, or the value is refused."""
    return Path(value) if kind is Path and isinstance(value, str) else value


def _unknown(stored: Any, read: Any, prefix: str) -> tuple[str, list[str]] | None:
    """The dotted name of a stored field that was not read, and the names that would have been."""
    if isinstance(stored, dict) and isinstance(read, dict):
        for name, value in stored.items():
            if name not in read:
                return prefix + name, list(read)
            odd = _unknown(value, read[name], f"{prefix}{name}.")
            if odd is not None:
                return odd
    elif isinstance(stored, list) and isinstance(read, list | tuple):
        for n, (a, b) in enumerate(zip(stored, read, strict=True)):
            odd = _unknown(a, b, f"{prefix}{n}.")
            if odd is not None:
                return odd
    return None


# -------------------------------------------------------------------- folders and locks


def sweep(folder: Path, pattern: str) -> None:
    """Remove what killed processes left in `folder`; names that match `pattern` end in `-<process id>`.

    Those of this process are removed, too (in a container every attempt may have the same id), so only the one writer
    of names of this pattern may call it.
    """
    for stale in folder.glob(pattern):
        owner = stale.name.rsplit("-", 1)[-1]
        if owner.isdigit() and int(owner) != os.getpid() and _alive(int(owner)):
            continue
        if stale.is_dir() and not stale.is_symlink():
            shutil.rmtree(stale, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                stale.unlink()


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` when the block ends well, and vanishes when it does not.

    A folder already at `path` is replaced; killed between the two renames which that takes, a process leaves
    `path` absent. What killed processes leave is swept on the next call.
    """
    with file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_dir():  # a folder may be replaced, a file may not
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        sweep(path.parent, f".{glob.escape(path.name)}.tmp-*")
        temporary = path.parent / f".{path.name}.tmp-{os.getpid()}"
        old = path.parent / f".{path.name}.old-{os.getpid()}"
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
                os.replace(path, old)
            os.replace(temporary, path)
            fsync_folder(path.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sweep(path.parent, f".{glob.escape(path.name)}.old-*")


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A temporary folder for downloads inside `folder`; those that killed processes left are removed.

    The caller holds the folder's lock.
    """
    with file_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(".fetch-*"):
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder, ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError) as e:  # also where asking is not permitted there is one
        return not isinstance(e, ProcessLookupError)
    return True


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[BinaryIO]:
    """Hold an exclusive lock between processes (and threads) while the block runs; `path` is its own file.

    The system drops the lock when its holder dies, so a killed process never blocks the next one. `waiting`
    is called once when another process holds it. A process that inherits the file holds the lock, too.
    """
    with file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+b")  # noqa: SIM115, closed below, and only then unlocked
    try:
        if not _try_lock(file):
            waiting()
            while not _try_lock(file):
                time.sleep(0.05)
        yield file
    finally:
        file.close()


def _try_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
