"""Checkpoints that are whole or not there, and a resume that continues to the last bit.

`<run>/checkpoints/step-000500/` holds `tensors.safetensors`, `state.json` and `manifest.json`, which carries
the size and sha256 of the other two. The folder is written under a temporary name, fsynced and renamed; only
then are old checkpoints deleted. What counts is a folder whose manifest holds. Nothing here ever unpickles.

The state of an optimizer is stored by parameter name (`flatten`, `unflatten`), so neither the order of parameters
nor that of groups matters. Settings of groups are not stored: they follow from the recipe and the step.
"""

import contextlib
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from speedrun.checks import Count
from speedrun.errors import OtherVersion, UserError
from speedrun.files import (
    decode_file,
    file_errors,
    from_json,
    new_folder,
    read_bytes,
    read_json,
    sha256_file,
    sweep,
    write_json,
)
from speedrun.optim import States

TENSORS = "tensors.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"

_FOLDER = re.compile(r"step-(\d{6,})")

Notice = Callable[[str], None]


WEIGHTS = "model."  # before the names of the model's tensors


@dataclass(frozen=True)
class Checkpoint:
    step: int  # steps done: 0 .. step-1
    tensors: dict[str, Tensor]  # on the CPU, each with memory of its own
    state: dict[str, Any]  # as JSON gives it back: tuples have become lists
    path: Path

    @property
    def weights(self) -> dict[str, Tensor]:
        """Of the model, by parameter, in float32 where the run keeps exact weights."""
        return {n.removeprefix(WEIGHTS): t for n, t in self.tensors.items() if n.startswith(WEIGHTS)}


class DamagedCheckpoint(UserError):
    """A checkpoint that must not be used; `reason` says which file is wrong and how."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"Checkpoint {path} cannot be used: {reason}. Resume from an older one or start again.")
        self.reason = reason


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- saving ---------------------------------------------------------------------------------------


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: dict[str, Any],
    *,
    keep: int = 2,
    notice: Notice = _to_stderr,
) -> Path:
    """Write the checkpoint of `step` into `folder`, then delete all but the newest `keep` up to this step.

    Checkpoints of later steps are left alone and not counted: they are another continuation of the same run,
    and `drop_later` is for them.
    """
    path = folder / f"step-{step:06d}"
    with file_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    sweep(folder, ".*.tmp-*")
    with new_folder(path) as temporary:
        _save_tensors(temporary / TENSORS, tensors)
        write_json(temporary / STATE, {"step": step, "state": state})
        files = {
            name: {"bytes": (temporary / name).stat().st_size, "sha256": sha256_file(temporary / name)}
            for name in (TENSORS, STATE)
        }
        write_json(temporary / MANIFEST, {"step": step, "files": files})
    for old in [p for p in _folders(folder) if _step_of(p) <= step][keep:]:
        _delete(old, notice)
    return path


def drop_later(folder: Path, step: int, notice: Notice = _to_stderr) -> None:
    """Delete the checkpoints beyond `step`, for a run that goes on from an older one than its newest."""
    for later in _folders(folder):
        if _step_of(later) > step:
            _delete(later, notice)


def _delete(path: Path, notice: Notice) -> None:
    # Renamed first, so that a half-deleted folder is never taken for a checkpoint.
    doomed = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        os.replace(path, doomed)
        shutil.rmtree(doomed)
    except OSError as e:
        notice(
            f"The old checkpoint {path} could not be deleted ({e.strerror or e}); delete it by hand if space is short."
        )


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as e:
        # The library hides the errno in its text; a full disk must be told as one.
        number = re.search(r"(?:os error|code:) (\d+)", str(e))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from e


# --- loading --------------------------------------------------------------------------------------


def load(path: Path) -> Checkpoint:
    """The checkpoint in the folder `path`, after checking every byte."""
    if not path.is_dir():
        raise UserError(f"There is no checkpoint at {path}. Name a folder like step-000500.")
    with _readable(path, MANIFEST):
        manifest = read_json(path / MANIFEST, _Manifest, "")
    step, files = manifest.step, manifest.files
    if _FOLDER.fullmatch(path.name) and _step_of(path) != step:
        raise DamagedCheckpoint(path, f"{MANIFEST} is of step {step}, not of its folder's")

    with _readable(path, STATE):
        content = read_bytes(path / STATE, "")
    _check(path, STATE, files, len(content), hashlib.sha256(content).hexdigest)
    with _readable(path, STATE):
        where = str(path / STATE)
        document = from_json(decode_file(content, where, ""), _State, where, "")
    if document.step != step:
        raise DamagedCheckpoint(path, f"{STATE} is of step {document.step}, {MANIFEST} of step {step}")

    with _readable(path, TENSORS):
        size = (path / TENSORS).stat().st_size
        _check(path, TENSORS, files, size, lambda: sha256_file(path / TENSORS))
        # Cloned, because what the library gives back lies in the mapped file at the file's alignment, and the
        # results of math libraries can depend on alignment.
        with safe_open(path / TENSORS, framework="pt", device="cpu") as f:
            tensors = {name: f.get_tensor(name).clone() for name in f.keys()}  # noqa: SIM118
    return Checkpoint(step, tensors, document.state, path)


def newest_good(folder: Path, notice: Notice) -> Checkpoint | None:
    """The newest checkpoint that passes every check; None when there is none at all.

    Each damaged one on the way is told to `notice`. When all are damaged that is an error: starting again
    from step 0 must be a person's decision.
    """
    candidates = _folders(folder)
    for n, path in enumerate(candidates):
        try:
            return load(path)
        except OtherVersion:  # good, and not ours to pass over
            raise
        except UserError as e:
            reason = e.reason if isinstance(e, DamagedCheckpoint) else str(e)
            if n + 1 < len(candidates):
                older = candidates[n + 1]
                notice(f"DAMAGED CHECKPOINT {path}: {reason}; falling back to step {_step_of(older)} in {older.name}.")
                continue
            raise UserError(
                f"None of the checkpoints in {folder} can be used (the last tried, {path.name}: {reason}). "
                "Restore one from a copy, or delete that folder to start again from step 0."
            ) from e
    return None


def _folders(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first. Temporary ones begin with a dot and do not count."""
    if not folder.exists():
        return []
    try:
        found = [p for p in folder.iterdir() if _FOLDER.fullmatch(p.name) and p.is_dir()]
    except OSError as e:
        raise UserError(f"The checkpoints in {folder} cannot be listed: {e.strerror}. Check the folder.") from e
    return sorted(found, key=_step_of, reverse=True)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


@dataclass(frozen=True)
class _Size:
    bytes: Count
    sha256: str


@dataclass(frozen=True)
class _Manifest:
    step: Count
    files: dict[str, _Size]

    def __post_init__(self) -> None:
        if set(self.files) != {TENSORS, STATE}:
            raise ValueError(f"it does not list {TENSORS} and {STATE}")


@dataclass(frozen=True)
class _State:
    step: Count
    state: dict[str, Any]


def _check(path: Path, name: str, files: dict[str, _Size], size: int, digest: Callable[[], str]) -> None:
    expected = files[name]
    if size != expected.bytes:
        raise DamagedCheckpoint(path, f"{name} has {size} bytes, {MANIFEST} says {expected.bytes}")
    if digest() != expected.sha256:
        raise DamagedCheckpoint(path, f"{name} does not match the sha256 in {MANIFEST}")


@contextlib.contextmanager
def _readable(path: Path, name: str) -> Iterator[None]:
    try:
        yield
    except (DamagedCheckpoint, OtherVersion):
        raise
    except UserError as e:
        raise DamagedCheckpoint(path, str(e).removeprefix(f"{path}{os.sep}").rstrip(". ")) from e
    except FileNotFoundError as e:
        raise DamagedCheckpoint(path, f"{name} is missing") from e
    except OSError as e:
        raise DamagedCheckpoint(path, f"{name} cannot be read ({e.strerror})") from e
    except SafetensorError as e:
        raise DamagedCheckpoint(path, f"{name} is no safetensors file ({e})") from e


# --- optimizers -----------------------------------------------------------------------------------


def flatten(states: States) -> tuple[dict[str, Tensor], States]:
    """The state of an optimizer as tensors called `optim.<parameter>.<key>`, and what is left of it for JSON."""
    tensors: dict[str, Tensor] = {}
    rest: States = {}
    for name, state in states.items():
        found = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        tensors |= {f"optim.{name}.{key}": value for key, value in found.items()}
        rest[name] = {key: value for key, value in state.items() if key not in found}
    return tensors, rest


def unflatten(tensors: Mapping[str, Tensor], rest: States) -> States:
    """What `flatten` was given; other tensors are ignored."""
    states = {name: dict(values) for name, values in rest.items()}
    for flat, tensor in tensors.items():
        kind, _, path = flat.partition(".")
        if kind == "optim":
            name, _, key = path.rpartition(".")
            states[name][key] = tensor
    return states
