"""Checkpoints that are whole or not there, and a resume that continues to the last bit.

`<run>/checkpoints/step-000500/` holds `tensors.safetensors`, `state.json` and `manifest.json`, which carries
the size and sha256 of the other two. The folder is written under a temporary name, fsynced and renamed; then
the text file `latest` is moved; only then are old checkpoints deleted. `latest` is a convenience for people:
what counts is a folder whose manifest holds. Nothing here ever unpickles.

An optimizer becomes tensors and JSON by parameter name (`flatten_optimizer`, `restore_optimizer`), so neither
the order of parameters nor that of groups matters. `rng_state` does the same for the random generators.
"""

import contextlib
import hashlib
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from speedrun.checks import Count
from speedrun.errors import OtherVersion, UserError
from speedrun.files import (
    decode_json,
    explained,
    from_json,
    new_folder,
    read_bytes,
    read_json,
    sha256_file,
    sweep,
    write_atomic,
    write_json,
)
from speedrun.optim.interleave import Whole

TENSORS = "tensors.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
LATEST = "latest"

# `.replaced-N` is a checkpoint set aside while another of the same step takes its name. It counts as one,
# because it may be the only good one when the process dies between the two renames.
_FOLDER = re.compile(r"step-(\d{6,})(?:\.replaced-(\d+))?")

Notice = Callable[[str], None]


@dataclass(frozen=True)
class Checkpoint:
    step: int  # steps done: 0 .. step-1
    tensors: dict[str, Tensor]  # on the CPU, each with memory of its own
    state: dict[str, Any]  # as JSON gives it back: tuples have become lists
    path: Path


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
    if keep < 1:
        raise UserError(f"{keep} checkpoints cannot be kept: keep at least 1.")
    if step < 0:
        raise ValueError(f"a checkpoint cannot be of step {step}")
    _require_json(state, "state")
    path = folder / f"step-{step:06d}"
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    sweep(folder, ".*.tmp-*")
    written, aliases = _distinct(tensors)
    aside = None
    try:
        with new_folder(path) as temporary:
            _save_tensors(temporary / TENSORS, written)
            write_json(temporary / STATE, {"step": step, "aliases": aliases, "state": state})
            files = {
                name: {"bytes": (temporary / name).stat().st_size, "sha256": sha256_file(temporary / name)}
                for name in (TENSORS, STATE)
            }
            write_json(temporary / MANIFEST, {"step": step, "files": files})
            if path.exists():
                aside = _spare_name(path)
                os.replace(path, aside)
    except BaseException:
        if aside is not None and not path.exists():
            os.replace(aside, path)
        raise
    write_atomic(folder / LATEST, path.name + "\n")

    earlier = [p for p in _folders(folder) if _step_of(p) <= step and p != path]
    kept = sorted({_step_of(p) for p in earlier} - {step}, reverse=True)[: keep - 1]
    for old in earlier:
        if _step_of(old) not in kept:
            _delete(old, notice)
    return path


def drop_later(folder: Path, step: int, notice: Notice = _to_stderr) -> None:
    """Delete the checkpoints beyond `step`, for a run that goes on from an older one than its newest."""
    for later in _folders(folder):
        if _step_of(later) > step:
            _delete(later, notice)


def _spare_name(path: Path) -> Path:
    n = 1
    while (spare := path.with_name(f"{path.name}.replaced-{n}")).exists():
        n += 1
    return spare


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


def _distinct(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What to write, and `aliases`: names whose tensor is, in place and shape, one already written.

    Safetensors refuses tensors that share memory, so views that merely overlap are copied.
    """
    written: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place in names:
            aliases[name] = names[place]
            continue
        names[place] = name
        on_cpu = tensor.to("cpu").contiguous()
        if on_cpu.untyped_storage().data_ptr() in storages:
            on_cpu = on_cpu.clone()
        storages.add(on_cpu.untyped_storage().data_ptr())
        written[name] = on_cpu
    return written, aliases


def _save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as e:
        # The library hides the errno in its text; a full disk must be told as one.
        number = re.search(r"(?:os error|code:) (\d+)", str(e))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from e


def _require_json(value: Any, where: str) -> None:
    """JSON turns other keys into strings without a word, and then a resume would not find them."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}: only strings survive JSON")
            _require_json(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for n, item in enumerate(value):
            _require_json(item, f"{where}[{n}]")
    elif not isinstance(value, str | int | float | bool | None):
        raise TypeError(f"{where} is a {type(value).__name__}: it belongs among the tensors, or must become JSON first")


# --- loading --------------------------------------------------------------------------------------


def load(path: Path) -> Checkpoint:
    """The checkpoint in the folder `path`, or the one a `latest` file names, after checking every byte."""
    path = _follow_latest(path)
    if not path.is_dir():
        raise UserError(f"There is no checkpoint at {path}. Name a folder like step-000500.")
    with _readable(path, MANIFEST):
        manifest = read_json(path / MANIFEST, _Manifest, "")
    step, files = manifest.step, manifest.files
    named = _FOLDER.fullmatch(path.name)
    if named and int(named[1]) != step:
        raise DamagedCheckpoint(path, f"{MANIFEST} is of step {step}, not of its folder's")

    with _readable(path, STATE):
        content = read_bytes(path / STATE, "")
    _check(path, STATE, files, len(content), hashlib.sha256(content).hexdigest)
    with _readable(path, STATE):
        document = from_json(decode_json(content, STATE, ""), _State, STATE, "")
    if document.step != step:
        raise DamagedCheckpoint(path, f"{STATE} is of step {document.step}, {MANIFEST} of step {step}")

    with _readable(path, TENSORS):
        size = (path / TENSORS).stat().st_size
        _check(path, TENSORS, files, size, lambda: sha256_file(path / TENSORS))
        # Cloned, because what the library gives back lies in the mapped file at the file's alignment, and the
        # results of math libraries can depend on alignment.
        with safe_open(path / TENSORS, framework="pt", device="cpu") as f:
            tensors = {name: f.get_tensor(name).clone() for name in f.keys()}  # noqa: SIM118
    for name, source in document.aliases.items():
        if source not in tensors:
            raise DamagedCheckpoint(path, f"{TENSORS} lacks {source!r}, which {STATE} refers to")
        tensors[name] = tensors[source].clone()
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
    return sorted(found, key=_age)


def _step_of(path: Path) -> int:
    return -_age(path)[0]


def _age(path: Path) -> tuple[int, bool, int]:
    match = _FOLDER.fullmatch(path.name)
    assert match is not None
    return -int(match[1]), match[2] is not None, -int(match[2] or 0)


def _follow_latest(path: Path) -> Path:
    if path.name != LATEST or not path.is_file():
        return path
    try:
        name = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path} cannot be read: {e}. Name the checkpoint folder instead.") from e
    if not _FOLDER.fullmatch(name):
        raise UserError(f"{path} names no checkpoint: {name[:80]!r}. Name the checkpoint folder instead.")
    return path.with_name(name)


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
    aliases: dict[str, str]
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


def flatten_optimizer(
    optimizer: torch.optim.Optimizer | Whole,
    names: Mapping[torch.nn.Parameter, str],
    skip: frozenset[str] = frozenset(),
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state as tensors called `optim.<parameter>.<key>`, and the rest as JSON; not the keys in `skip`.

    The JSON part says which tensors belong to it, so that several optimizers can share one checkpoint.
    """
    tensors: dict[str, Tensor] = {}
    states: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []

    def put(flat: str, tensor: Tensor) -> None:
        if flat in tensors:
            raise ValueError(f"two pieces of optimizer state are called {flat!r}")
        tensors[flat] = tensor

    for group in optimizer.param_groups:
        members = [_name_of(p, names) for p in group["params"]]
        for p, name in zip(group["params"], members, strict=True):
            if name in states:
                raise ValueError(f"two parameters are called {name!r}")
            values, tensor_keys = {}, []
            for key, value in optimizer.state.get(p, {}).items():
                if key in skip:
                    continue
                if isinstance(value, Tensor):
                    put(f"optim.{name}.{key}", value.detach())
                    tensor_keys.append(key)
                else:
                    _require_json(value, f"the state {key!r} of {name}")
                    values[key] = value
            states[name] = {"shape": list(p.shape), "tensors": tensor_keys, "values": values}
        options, tensor_options = {}, []
        for key, value in group.items():
            if key in ("params", "param_names", "dtype"):  # the last is how this machine multiplies
                continue
            if isinstance(value, Tensor):
                if members:
                    put(f"optim.{members[0]}.group.{key}", value.detach())
                    tensor_options.append(key)
            else:
                _require_json(value, f"the group option {key!r}")
                options[key] = value
        groups.append({"params": members, "options": options, "tensors": tensor_options})

    known = {p for group in optimizer.param_groups for p in group["params"]}
    strangers = optimizer.state.keys() - known
    if strangers:
        raise TypeError(f"the optimizer keeps state for {len(strangers)} things that are in none of its groups")
    return tensors, {"groups": groups, "state": states}


@torch.no_grad()
def restore_optimizer(
    optimizer: torch.optim.Optimizer | Whole,
    names: Mapping[torch.nn.Parameter, str],
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
) -> None:
    """Put back what `flatten_optimizer` took, by parameter name. On an error the optimizer is as it was.

    State that the optimizer already has is overwritten in place, as it may be a view into a larger buffer.
    """
    params = {_name_of(p, names): (p, group) for group in optimizer.param_groups for p in group["params"]}
    saved = state["state"]
    missing, extra = sorted(params.keys() - saved.keys()), sorted(saved.keys() - params.keys())
    if missing:
        raise UserError(
            f"The checkpoint has no optimizer state for {_some(missing)}. Resume with the recipe of the run."
        )
    if extra:
        raise UserError(
            f"The checkpoint has optimizer state for {_some(extra)}, which the model lacks. "
            "Resume with the recipe of the run."
        )
    sources: dict[str, dict[str, Tensor]] = {}
    for name, (p, _) in params.items():
        entry = saved[name]
        if list(p.shape) != entry["shape"]:
            raise UserError(
                f"{name} has shape {list(p.shape)}, in the checkpoint {entry['shape']}. "
                "Resume with the recipe of the run."
            )
        sources[name] = {key: _tensor(tensors, f"optim.{name}.{key}") for key in entry["tensors"]}
        for key, source in sources[name].items():
            here = optimizer.state.get(p, {}).get(key)
            if isinstance(here, Tensor):
                _same_kind(f"The optimizer state {key!r} of {name}", here, source)
    options = _options_of_groups(optimizer, names, tensors, state["groups"])

    for group, values in zip(optimizer.param_groups, options, strict=True):
        for key, value in values.items():
            here = group.get(key)
            if isinstance(value, Tensor):
                group[key] = here.copy_(value) if isinstance(here, Tensor) else value.clone()
            else:
                group[key] = tuple(value) if isinstance(here, tuple) and isinstance(value, list) else value
    for name, (p, group) in params.items():
        entry = saved[name]
        if not entry["tensors"] and not entry["values"]:
            optimizer.state.pop(p, None)
            continue
        current = optimizer.state[p]
        for key in current.keys() - set(entry["tensors"]) - set(entry["values"]):
            del current[key]
        current.update(entry["values"])
        for key, source in sources[name].items():
            here = current.get(key)
            room = here if isinstance(here, Tensor) else _new_state(key, source, p, group)
            current[key] = room.copy_(source)


def _name_of(p: torch.nn.Parameter, names: Mapping[torch.nn.Parameter, str]) -> str:
    if p not in names:
        raise ValueError(f"the optimizer has a parameter of shape {list(p.shape)} that has no name")
    return names[p]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _tensor(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise UserError(f"The checkpoint lacks the tensor {name!r}. Resume from another one.")
    return tensors[name]


def _same_kind(what: str, here: Tensor, saved: Tensor) -> None:
    if here.shape != saved.shape or here.dtype != saved.dtype:
        raise UserError(
            f"{what} is {here.dtype} {list(here.shape)}, in the checkpoint {saved.dtype} {list(saved.shape)}."
            " Resume with the recipe of the run."
        )


def _new_state(key: str, source: Tensor, p: Tensor, group: dict[str, Any]) -> Tensor:
    """Room for one piece of state, where and how torch's own optimizers would have made it."""
    if source.shape == p.shape and p.dim() > 0:
        # Not contiguous but with the parameter's strides: kernels expect the two to agree.
        return torch.empty_like(p, dtype=source.dtype, requires_grad=False)
    # Step counters stay on the CPU, unless the kernel itself reads them.
    at_home = key != "step" or group.get("fused") or group.get("capturable")
    return torch.empty(source.shape, dtype=source.dtype, device=p.device if at_home else "cpu")


def _options_of_groups(
    optimizer: torch.optim.Optimizer | Whole,
    names: Mapping[torch.nn.Parameter, str],
    tensors: Mapping[str, Tensor],
    saved_groups: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """For each group of `optimizer`, the options its parameters had, whatever groups they were in."""
    by_name: dict[str, dict[str, Any]] = {}
    for group in saved_groups:
        options = dict(group["options"])
        for key in group["tensors"]:
            options[key] = _tensor(tensors, f"optim.{group['params'][0]}.group.{key}")
        by_name.update(dict.fromkeys(group["params"], options))
    result = []
    for group in optimizer.param_groups:
        members = [names[p] for p in group["params"]]
        for other in members[1:]:
            if not _equal_options(by_name[members[0]], by_name[other]):
                raise UserError(
                    f"{members[0]} and {other} are in one optimizer group here, but the checkpoint has "
                    "different settings for them. Resume with the recipe of the run."
                )
        options = by_name[members[0]] if members else {}
        for key, value in options.items():
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                _same_kind(f"The group option {key!r} of {members[0]}", group[key], value)
        result.append(options)
    return result


def _equal_options(a: dict[str, Any], b: dict[str, Any]) -> bool:
    if a.keys() != b.keys():
        return False
    for key in a:
        if isinstance(a[key], Tensor) and isinstance(b[key], Tensor):
            if not torch.equal(a[key], b[key]):
                return False
        elif isinstance(a[key], Tensor) or isinstance(b[key], Tensor) or a[key] != b[key]:
            return False
    return True


# --- random generators ----------------------------------------------------------------------------


def rng_state() -> dict[str, Tensor]:
    """This process's random generators (torch on the CPU and its GPU, python, numpy) as tensors."""
    version, words, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    if not isinstance(legacy, dict) or legacy["bit_generator"] != "MT19937":
        raise ValueError("numpy's global generator was replaced; only its own, MT19937, can be saved")
    state = {
        "rng.torch": torch.get_rng_state(),
        "rng.python": torch.tensor([version, *words], dtype=torch.int64),
        "rng.python.gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "rng.numpy": torch.tensor(
            [*legacy["state"]["key"].tolist(), legacy["state"]["pos"], legacy["has_gauss"]], dtype=torch.int64
        ),
        "rng.numpy.gauss": torch.tensor([legacy["gauss"]], dtype=torch.float64),
    }
    # Not "available": asking a GPU that nobody uses would start a context on it.
    if torch.cuda.is_initialized():
        state["rng.cuda"] = torch.cuda.get_rng_state()
    if torch.backends.mps.is_available():
        state["rng.mps"] = torch.mps.get_rng_state()
    return state


def set_rng_state(tensors: Mapping[str, Tensor]) -> None:
    """Put back what `rng_state` took. Other tensors are ignored; so is a GPU this machine does not have."""
    words = [int(n) for n in _tensor(tensors, "rng.python").tolist()]
    gauss = _tensor(tensors, "rng.python.gauss").tolist()
    *key, position, has_gauss = _tensor(tensors, "rng.numpy").tolist()
    cached = _tensor(tensors, "rng.numpy.gauss").item()
    cpu = _tensor(tensors, "rng.torch")
    try:
        random.setstate((words[0], tuple(words[1:]), gauss[0] if gauss else None))
        np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(cpu.clone())
    except (ValueError, TypeError, RuntimeError) as e:
        raise UserError(
            f"The random state in the checkpoint does not fit this Python, numpy or torch ({e}). "
            "Resume with the versions in run.json."
        ) from e
    if "rng.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["rng.cuda"].clone())
    if "rng.mps" in tensors and torch.backends.mps.is_available():
        torch.mps.set_rng_state(tensors["rng.mps"].clone())
